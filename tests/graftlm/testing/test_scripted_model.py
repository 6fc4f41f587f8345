"""The public stand-in for weights: its answers are written down, the engine around it is the real one."""

from __future__ import annotations

import subprocess
import sys

import dspy
import pytest

import graftlm as gl
from graftlm.adapters.dspy import GraftAdapter, GraftLM
from graftlm.testing import ScriptedModel, byte_tokenizer


def test_the_answer_is_the_scripts_and_the_prompt_is_recorded() -> None:
    model = ScriptedModel(lambda prompt: f"{prompt} is in Dörvik")
    with model.runtime() as runtime:
        done = runtime.generate("Mara")
    assert (done.text, done.finish_reason, done.usage.completion_tokens) == ("Mara is in Dörvik", "stop", 19)
    assert model.prompts == ["Mara"]


def test_a_script_sees_messages_as_the_chat_template_writes_them() -> None:
    model = ScriptedModel()
    with model.runtime() as runtime:
        runtime.generate([{"role": "user", "content": "Hi"}])
    assert model.prompts == ["<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"]


def test_one_hand_over_is_one_batch_and_shares_its_prefix() -> None:
    model = ScriptedModel(lambda prompt: prompt[-1])
    with model.runtime() as runtime:
        answers = runtime.generate([f"The same beginning {i}" for i in range(8)])
        stats = runtime.stats()
    assert [answer.text for answer in answers] == list("01234567")
    assert model.batches == [8] and stats.largest_batch == 8
    assert stats.computed_tokens == 20 + 7


def test_what_a_script_raises_is_the_error_of_its_request_alone() -> None:
    def script(prompt: str) -> str:
        if prompt == "bad":
            raise gl.RequestTimeout("10 s passed")
        return "fine"

    with ScriptedModel(script).runtime() as runtime:
        good, bad = runtime.submit_many([gl.Request("good"), gl.Request("bad")])
        assert good.result().text == "fine"
        with pytest.raises(gl.RequestTimeout, match="10 s passed"):
            bad.result()


def test_constraints_stops_and_limits_are_those_of_the_engine() -> None:
    with ScriptedModel(lambda prompt: "painter\nand more").runtime() as runtime:
        assert runtime.generate("x", stop="\n").text == "painter"
        assert runtime.generate("x", max_tokens=4).finish_reason == "length"
        assert runtime.generate("x", choices=["baker", "painter"]).text == "painter"
        assert runtime.select("x", ["baker", "painter"]).choice == "painter"


def test_where_a_schema_forbids_the_script_the_text_closes() -> None:
    schema = {"properties": {"names": {"type": "array", "items": {"type": "string"}}}, "required": ["names"]}
    with ScriptedModel(lambda prompt: '{"ages').runtime() as runtime:
        assert runtime.generate("x", json_schema={"type": "object", **schema}).text == '{"names":[""]}'


def test_a_field_of_a_signature_is_chosen_by_the_script() -> None:
    reply = "[[ ## job ## ]]\npainter\n\n[[ ## completed ## ]]"
    with ScriptedModel(lambda prompt: reply).runtime() as runtime:
        lm, adapter = GraftLM(runtime=runtime, temperature=0), GraftAdapter()
        with dspy.context(lm=lm, adapter=adapter):
            assert dspy.Predict("text -> job: Literal['baker', 'painter']")(text="x").job == "painter"


def test_a_script_spells_its_text_with_the_longest_tokens() -> None:
    tokenizer = byte_tokenizer(merges=[("a", "b"), ("ab", "c")])
    with ScriptedModel(lambda prompt: "abcab").runtime(tokenizer=tokenizer) as runtime:
        assert runtime.generate("x").usage.completion_tokens == 3  # "abc", "ab", the end


def test_held_requests_wait_and_can_be_cancelled() -> None:
    model = ScriptedModel()
    model.hold()
    with model.runtime() as runtime:
        first, second = runtime.submit(gl.Request("a")), runtime.submit(gl.Request("b"))
        model.wait_for(2)
        assert not first.done() and first.cancel()
        model.release()
        assert second.result().text == "!"
        assert runtime.stats().slots_in_use == 0
    with pytest.raises(TimeoutError, match="2 of 3 requests arrived"):
        model.wait_for(3, timeout_s=0.01)


def test_a_process_with_a_scripted_model_used_to_import_what_only_real_ones_need() -> None:
    code = """
import sys
from graftlm.testing import ScriptedModel, random_model
with ScriptedModel(lambda prompt: "Dorvik").runtime() as runtime:
    assert runtime.generate("Mara lives in").text == "Dorvik"
assert "transformers.modeling_utils" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
