"""Two turns of LangChain messages for each input, whose tokens can be counted without any engine."""

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

NAMES = ("Mara Velm", "Ada Holt", "Ben Orlo", "Iris Tann", "Otto Renn", "Nina Sarr", "Tom Wick")


def messages(name):
    return [
        SystemMessage("Answer with one or two words."),
        HumanMessage(f"{name} works as a baker. What does {name} work as?"),
        AIMessage("baker"),
        HumanMessage(f"And where does {name} live? {name} lives in Oslo."),
    ]


def inputs():
    return list(NAMES)


def run(llm, inputs):
    return [answer.content for answer in llm.batch([messages(name) for name in inputs])]
