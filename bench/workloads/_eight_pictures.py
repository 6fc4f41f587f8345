"""Eight pictures, 64 questions: eight about each, all at once. Run it by `graftlm ab FILE --model VISION_MODEL`.

The suite leaves it out, since its model reads text only. Answers are compared between engines, not judged.
"""

import base64
import io
import random

import graftlm as gl

PICTURES, QUESTIONS = 8, 8
SIDES = (1024, 768)
max_tokens = 64
ASKED = ["colours", "shapes", "lines", "corners", "contrasts", "textures", "patterns", "edges"]


def jpeg(seed):
    """Return a photograph-like picture: smooth noise, as a JPEG."""
    import numpy as np
    from PIL import Image

    width, height = SIDES
    noise = np.random.default_rng(seed).integers(0, 256, (height // 16, width // 16, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize(SIDES, Image.Resampling.BICUBIC).save(file, "JPEG", quality=85)
    return base64.b64encode(file.getvalue()).decode()


def inputs():
    found = [
        {"picture": picture, "question": f"Describe the {asked} of this picture in one sentence."}
        for picture in (jpeg(seed) for seed in range(PICTURES))
        for asked in ASKED[:QUESTIONS]
    ]
    random.Random(0).shuffle(found)
    return found


def warm_up():
    return [{"picture": jpeg(PICTURES), "question": "Describe it."}]


@gl.program(temperature=0)
def _answer(s, picture, question):
    s += gl.user(gl.image(f"data:image/jpeg;base64,{picture}") + question)
    s += gl.assistant(gl.gen("answer", max_tokens=max_tokens))


def run_native(llm, inputs):
    return [state["answer"].strip() for state in _answer.batch(inputs, runtime=llm)]


def run_langchain(llm, inputs):
    from langchain_core.messages import HumanMessage

    def asked(one):
        picture = {"type": "image", "base64": one["picture"], "mime_type": "image/jpeg"}
        return [HumanMessage([picture, {"type": "text", "text": one["question"]}])]

    return [str(answer.content).strip() for answer in llm.batch([asked(one) for one in inputs])]


def run_llama_index(llm, inputs):
    from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock

    def ask(one):
        blocks = [ImageBlock(image=base64.b64decode(one["picture"])), TextBlock(text=one["question"])]
        return llm.achat([ChatMessage(blocks=blocks)])

    async def all_of_them():
        import asyncio

        return await asyncio.gather(*map(ask, inputs))

    import asyncio

    return [str(answer.message.content).strip() for answer in asyncio.run(all_of_them())]
