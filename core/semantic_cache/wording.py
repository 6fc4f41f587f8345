"""Wording: the words that two texts of one meaning must have in common, after wordings of one meaning became one."""

from __future__ import annotations

import re
from functools import lru_cache

from graftlm.core.semantic_cache import english

_MAX_WORDS, _MAX_LETTERS = 60, 600
"""Length of the longest text that rules change; longer ones are documents rather than questions."""

_KEPT = "\ue000"
"""Sign before the number of a quotation, which no rule changes."""

_QUOTED = re.compile(r"\"[^\"]+\"|“[^”]+”|«[^»]+»|(?<!\w)'[^']+'(?!\w)|`[^`]+`|‘[^’]+’(?!\w)")
_TOKEN = re.compile(
    _KEPT + r"\d+|(?<!\w)\.\d+|\d{1,3}(?:,\d{3})+(?!\d)|\d+(?:[.,:/]\d+)*(?:(?:st|nd|rd|th)\b)?|"
    r"[^\W\d]\w*(?:['.][^\W\d_]+)*|\S"
)
_ENDS = re.compile(r"(?<=[.?!])\s+(?=\S)")
_ABBREVIATED = re.compile(
    r"(?:\b(?:mr|mrs|ms|dr|st|prof|no|vs|e\.g|i\.e|etc|approx|inc|jr|sr|fig|vol|ca|[a-z])\.)$", re.IGNORECASE
)
_CONTENT = re.compile(r"^(.*?\w)\s*:\s+(.+)$")
_AUXILIARY = "|".join(english.AUXILIARIES)
_YES_NO = re.compile(rf"^(?:{_AUXILIARY}|has|had) (?!not\b)|^(?:is|are|was|were|does|did|can|could|should|would) not ")
_WH = "|".join(sorted(english.QUESTION_WORDS))
_FRONTED = re.compile(
    rf"^((?:{'|'.join(sorted(english.PREPOSITIONS - {'of'}))}|when|to|in order to|even if|only if) [^,]+), "
    r"(?!and\b|or\b|then\b)([^,]+)$"
)
_FRONTED_PLAIN = re.compile(
    rf"^((?:in|on|at|for|with|without|during|under|from|to|by) (?:(?!{_WH}|that\b)[^ ,]+ ){{1,6}}?)"
    rf"((?:{_WH}|is|are|was|were|do|does|did|can|could|will|would|should) .+)$"
)
_STATED = re.compile(rf"^([^,]+), ((?:{_WH}|do|does|did|is|are|can|could|should|will|would|must|may|shall) [^,]+)$")
_PRONOUNS = frozenset(
    ["i", "you", "he", "she", "it", "we", "they", "my", "your", "his", "her", "our", "their", "this", "that"]
)
_WITH_ARTICLE = frozenset(["few", "little", "lot", "bit", "most", "while", "couple"])
_WISH = re.compile(r"^(?:i|we) (?:want|need|would like|am trying|have|am looking) to (.+)$")
_HOW_SO = re.compile(
    r"^how(?: do| can| should| could| would)?(?: i| we)?(?: go about| do| achieve)?(?: it| that| this| so)?(?: \?)?$|"
    r"^what do i do(?: \?)?$"
)
_FIRST = re.compile(r"\b(?:i|me|my|mine|we|us|our)\b")
_SECOND = re.compile(r"\b(?:you|your|yours)\b")
_SYMMETRIC = re.compile(
    r"\bbetween ((?:[^ ]+ ){1,3}?)and ((?:[^ ]+ ?){1,3}?)"
    r"(?= (?:in|on|at|for|with|by|from|of|under|to|during|when|if)\b|$)"
)
_OR = re.compile(r"^((?:which|who|what)\b.*[^ ]), ([^ ,]+(?: [^ ,]+)?)(?: ,)? or ([^ ,]+(?: [^ ,]+)?)$")
_EITHER = re.compile(r"^(is|are) ([^ ,]+(?: [^ ,]+)?) or ([^ ,]+(?: [^ ,]+)?) (\w+er|better|worse|more \w+)$")
_MONTH = r"(january|february|march|april|\^?may|june|july|august|september|october|november|december)"
_DATE = re.compile(
    rf"\b{_MONTH} (\d{{1,2}})(?:st|nd|rd|th)?\b(?! \d{{1,2}}\b)|\b(\d{{1,2}})(?:st|nd|rd|th) (?:of )?{_MONTH}\b"
)
_TABLES = (english.QUESTION_WORDS, english.ARTICLES, english.PREPOSITIONS, english.AUXILIARIES, english.SYNONYMS)
_TAGGED = frozenset().union(*_TABLES, english.CHAT, ["us", "it", "me", "my", "no", "not", "and", "or", "you", "one"])


@lru_cache(1024)
def marks(text: str) -> tuple[str, ...]:
    """Return the words that must be equal, and in one order, in texts of one meaning.

    Wordings of English that mean one thing become one: politeness, frames ("tell me if"), contractions, auxiliaries,
    articles, plain synonyms of formal words, measures ("how tall", "the height"), a phrase that stands in front.
    All other words count as they are written. So do quotations, the text after a colon, texts of other languages,
    questions about words, code and long texts.
    """
    text = " ".join(text.replace("’", "'").split())
    if len(text) > _MAX_LETTERS or text.count(" ") >= _MAX_WORDS or _KEPT in text:
        return ("==", text)
    if not _is_english(text):
        return _exact(text)
    quoted: list[str] = []

    def keep(found: str) -> str:
        quoted.append(found)
        return f" {_KEPT}{len(quoted) - 1} "

    text = _QUOTED.sub(lambda found: keep(found[0][1:-1]), text)
    content = _CONTENT.match(text)
    if content is not None and _unframed(_normal(content[1])):
        text = content[1] + keep(content[2])
    elif content is not None:
        text = content[2]
    sentences = [_normal(one) for one in _sentences(text)]
    sentences = [one for one in sentences if _unframed(one.removesuffix(" ?"))]
    if not sentences:
        return _exact(text)
    found = [one for sentence in _asked_last(sentences) for one in ("||", *_canonical(sentence))][1:]
    return tuple(f'"{quoted[int(one[1:])]}"' if one.startswith(_KEPT) else one for one in found)


def is_text_task(context: str) -> bool:
    """Return True if a text before the one that is compared asks for work on its words, as a translation does."""
    return english.TEXT_TASK.search(context) is not None


def _exact(text: str) -> tuple[str, ...]:
    return ("==", *_TOKEN.findall(text.lower().rstrip(".?! ")))


def _is_english(text: str) -> bool:
    words = re.findall(r"[^\W\d_]+(?:'[^\W\d_]+)*|[¿¡]", text.lower())
    known, foreign = (sum(word in some for word in words) for some in (english.DISTINCTIVE, english.FOREIGN))
    if any(ord(one) >= 0x250 for one in text if one.isalpha()):
        return False
    plain = not any(word in english.ARTICLES or word in english.AUXILIARIES for word in words)
    return known > foreign or (plain and not foreign)


def _sentences(text: str) -> list[str]:
    """Split a text at the ends of its sentences."""
    found: list[str] = []
    for part in _ENDS.split(text):
        if found and _ABBREVIATED.search(found[-1]):
            found[-1] += " " + part
        else:
            found.append(part)
    return found


def _normal(sentence: str) -> str:
    """Return the tokens of a sentence in lower case between single spaces, contractions written out.

    A capital within a sentence marks a name: it gets a "^" if a table has its word, so that no rule changes it.
    """
    asked = sentence.rstrip().endswith("?")
    sentence = re.sub(r"\s[-–—]{1,2}\s(?=[^\W\d])(?<=[^\W\d]\s[-–—]\s)", " , ", sentence)
    tokens = _TOKEN.findall(re.sub(r"!(?=\w)", "¬", sentence))
    letters = [one for one in tokens if one[0].isalpha()]
    titled = sum(one[0].isupper() for one in letters) > max(2, 0.7 * len(letters))
    found: list[str] = []
    for place, token in enumerate(tokens):
        before, after = tokens[place - 1] if place else " ", tokens[place + 1] if place + 1 < len(tokens) else " "
        if token in ".?;…“”" or (token in "!\"'" and not before[0].isdigit()):
            continue
        if token == "-" and before[-1].isalpha() and after[0].isalpha():
            continue
        word = token.lower()
        if place and token[0].isupper() and not titled and word in _TAGGED:
            word = "^" + word
        found.append(word.replace(",", "") if word[0].isdigit() and re.fullmatch(r"\d{1,3}(,\d{3})+", word) else word)
    about_words = english.ABOUT_WORDS.search(" ".join(found)) is not None
    text = " ".join(found if about_words else [english.CHAT.get(word, word) for word in found])
    for pattern, replacement in english.CONTRACTIONS if about_words else english.NOT + english.CONTRACTIONS:
        text = pattern.sub(replacement, text)
    text = re.sub(r"(?<=\w)'s\b", " 's", text)
    return " ".join(text.split()) + (" ?" if asked else "")


def _asked_last(sentences: list[str]) -> list[str]:
    """Return sentences with the question at the end, if there is one question; without the marks of questions."""
    if len(sentences) == 1:
        parts = _STATED.match(sentences[0].removesuffix(" ?").replace(" , ", ", "))
        if parts is not None and not _FRONTED.match(parts[0]) and _unframed(parts[1]):
            before = _unframed(parts[1] + " what")
            sentences = [parts[1], parts[2] + " ?"] if before == parts[1] + " what" else sentences
    if len(sentences) == 2 and (wish := _WISH.match(sentences[0])) is not None and _HOW_SO.match(sentences[1]):
        return [f"how to {wish[1]}"]
    questions = [one for one in sentences if one.endswith(" ?")]
    if len(questions) == 1:
        sentences = [one for one in sentences if one is not questions[0]] + questions
    return [one.removesuffix(" ?") for one in sentences]


def _unframed(text: str) -> str:
    """Return a sentence without politeness, and without what asks for the answer."""
    before = None
    while text != before:
        before, text = text, english.apply(english.FRAMES, english.apply(english.POLITE, text).strip(" ,")).strip(" ,")
    return text


def _canonical(text: str) -> list[str]:
    """Return the words of a sentence after wordings of one meaning became one."""
    text = _unframed(text)
    if english.ABOUT_WORDS.search(text):
        return english.apply(english.DEFINE, text).split()
    text = _fronted(_plain(text))
    if _YES_NO.match(text):
        text = f"? {text}"
    return _numbers(_without_auxiliary(_floated(_requests(text)).split()))


def _plain(text: str) -> str:
    """Return a sentence with plain words in place of formal ones, American spelling, dates with the day first."""
    words = english.apply(english.PLAIN, text).split()
    text = " ".join(english.SYNONYMS.get(word, word) for word in words)
    text = re.sub(r"\b(\w{3,})is(e|es|ed|ing|ation)\b", _american, text)
    text = _DATE.sub(lambda found: f"{found[2] or found[3]} {found[1] or found[4]}", text)
    return re.sub(r"\$ (\d[\d.,]*)", r"\1 dollars", re.sub(r"€ (\d[\d.,]*)", r"\1 euros", text))


_NOT_IZED = re.compile(
    "(?:adv|dev|rev|superv|improv|telev|ar|r|pr|prem|prom|comprom|surpr|compr|enterpr|desp|disgu|exerc|exc|prec|conc|expert|"
    "franch|merchand|dem|no|cru|bru|po|treat|advert|other|like|ra|pra)$"
)
"""Words in "-ise", without it, that are never written with "-ize"."""


def _american(found: re.Match[str]) -> str:
    return found[0] if _NOT_IZED.fullmatch(found[1]) or len(found[1]) < 4 else f"{found[1]}iz{found[2]}"


def _fronted(text: str) -> str:
    """Move a phrase that stands in front to the end; order what stands in no order."""
    text = text.replace(" , ", ", ")
    found = _FRONTED.match(text) or _FRONTED_PLAIN.match(text)
    if found is not None:
        text = f"{_unframed(found[2].strip())} {found[1].strip()}"
    text = _EITHER.sub(r"which \1 \4, \2 or \3", text)
    choice = _OR.match(text)
    if choice is not None:
        text = f"{choice[1]}, {' or '.join(sorted([choice[2], choice[3]]))}"
    return text.replace(", ", " ").strip()


def _requests(text: str) -> str:
    """Give requests of one meaning one form."""
    if not (_FIRST.search(text) and _SECOND.search(text)):
        for given in (english.HOW, english.MODALS):
            text = english.apply(given, text, first=True)
        if text.startswith(("how-to ", "?can ", "?must ", "?should ")):
            return _generic(text)
    text = english.apply(english.REQUESTS, text)
    if text.startswith("duration "):
        text = " ".join(["duration", _base(text.split()[1]), *text.split()[2:]])
    if " between " in text:
        text = _SYMMETRIC.sub(_sorted, text)
    return text


def _sorted(found: re.Match[str]) -> str:
    """Return "between" two things with both in the order of the alphabet, without articles."""
    both = (re.sub(r"\b(?:a|an|the) (?=[^ ])", "", one).strip() for one in (found[1], found[2]))
    return f"between {' and '.join(sorted(both))}"


def _generic(text: str) -> str:
    """Return a question that anyone may ask: the verb in its base form, one possessive for the person who asks."""
    mark, verb, *rest = [*text.split(), ""]
    return " ".join(
        [mark, _base(verb) if mark == "how-to" else verb, *("my" if one in ("your", "our") else one for one in rest)]
    )


def _base(verb: str) -> str:
    """Return a verb without "-ing"."""
    stem = verb[:-3]
    if not verb.endswith("ing") or len(stem) < 2 or not re.search("[aeiouy]", stem):
        return verb
    if re.search(r"([bdgmnprt])\1$", stem):
        return stem[:-1]
    if re.search(r"(?:[vcu]|[^aeiou]g|at|iz|[^aeiou]l)$|^[^aeiou]*[aeiou][^aeiouwxy]$", stem) and not stem.endswith(
        ("eat", "oat")
    ):
        return stem + "e"
    return stem


def _floated(text: str) -> str:
    """Move the one expression of time of a simple sentence to its end, and a place to go to behind the one left."""
    times = [*english.TIME.finditer(f" {text}")]
    if len(times) == 1 and not english.SUBORDINATE.search(text):
        start, end = times[0].span()
        text = f"{f' {text}'[:start].strip()} {f' {text}'[end:].strip()} {times[0][1]}".strip()
    return re.sub(r"\bto ((?:[^ ]+ ?){1,2}?) from ((?:[^ ]+ ?){1,2})$", r"from \2 to \1", text)


def _without_auxiliary(words: list[str]) -> list[str]:
    """Take articles out, and the only auxiliary of a question, whose place changes; its kind is added at the end."""
    asks = words[:1] != [] and words[0] in english.QUESTION_WORDS | {"?"}
    places = [i for i, word in enumerate(words) if word in english.AUXILIARIES and not _mentioned(words, i)]
    added: list[str] = []
    if words[:1] in (["what"], ["which"]):
        # "which dogs bite", not "what do dogs bite"
        bare = (
            len(words) < 2 or words[1] in english.AUXILIARIES | dict.fromkeys(english.ARTICLES) or words[1] in _PRONOUNS
        )
        words = ["what" if bare else "which", *words[1:]]
    if words[:1] == ["what"] and len(words) > 2 and words[1] in ("is", "are") and places == [1]:
        words = words[2:]
    elif words[:2] == ["what", "the"] and words[-1] in ("is", "are") and places == [len(words) - 1]:
        words = words[1:-1]
    elif asks and len(places) == 1:
        place = places[0]
        kind = english.AUXILIARIES[words[place]]
        main = kind == "do" and (place == len(words) - 1 or words[place + 1] in english.PREPOSITIONS)
        added = [] if kind == "do" else [f"+{kind}"]
        words = [*words[:place], *(["do"] if main else []), *words[place + 1 :]]
    else:
        words = [english.AUXILIARIES.get(word, word) for word in words]
    if asks and not places:
        words = ["have" if word == "has" else word[:-1] if word in english.VERBS_S else word for word in words]
    exact_articles = words[:1] == ["?"] and added in (["+be"], ["+was"])
    kept: list[str] = []
    for place, word in enumerate(words):
        following = words[place + 1] if place + 1 < len(words) else ""
        if word in english.ARTICLES and not _mentioned(words, place) and following not in _WITH_ARTICLE:
            if exact_articles and word != "the":
                kept.append("a")
            continue
        dropped = (word == "of" and kept and not kept[-1][0].isdigit()) or (
            word == "there" and added == ["+be"] and kept == ["?"]
        )
        if not dropped and (word not in ("really", "actually", "please") or kept[-1:] == ["not"]):
            kept.append(word)
    return kept + added


def _mentioned(words: list[str], place: int) -> bool:
    """Return True if a function word stands for itself: at the end, after a number, beside "and", "or" or another."""
    following = words[place + 1] if place + 1 < len(words) else ""
    before = words[place - 1] if place else ""
    if words[place] in english.ARTICLES:
        return not following or following in english.PREPOSITIONS | english.AUXILIARIES.keys() | {"and", "or", "versus"}
    return (
        before[:1].isdigit()
        or before in ("and", "or", "between", "versus", "the", "a", "word")
        or following in ("and", "or", "versus")
    )


def _numbers(words: list[str]) -> list[str]:
    """Write numbers as digits."""
    found: list[str] = []
    for word in words:
        digits = english.NUMBERS.get(word)
        tens = found[-1:] and found[-1].isdigit() and found[-1].endswith("0") and int(found[-1]) >= 20
        if digits is not None and tens and len(digits) == 1 and digits != "0" and len(found[-1]) == 2:
            found[-1] = str(int(found[-1]) + int(digits))
        else:
            found.append(word if digits is None else digits)
    return found
