"""English: closed word classes, contractions and plain synonyms, and the frames in which requests are put.

The tables name function words and wordings of the language, none of a subject. A word that no table names is compared
as it is written.
"""

# ruff: noqa: E501  (one rule, one line)
from __future__ import annotations

import re
from collections.abc import Iterator


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _pairs(text: str) -> dict[str, str]:
    """Return what stands for each word, of a text "word: other words, ..."."""
    return {word.strip(): other.strip() for word, other in (pair.split(":") for pair in text.split(","))}


AUXILIARIES = {
    "is": "be", "are": "be", "am": "be", "was": "was", "were": "was", "do": "do", "does": "do", "did": "did",
    "can": "can", "could": "could", "may": "may", "might": "might", "must": "must", "should": "should",
    "will": "will", "would": "would", "shall": "shall",
}  # fmt: skip
"""Auxiliary verbs that change places with the subject in a question, and the form that stands for them."""

QUESTION_WORDS = _words("how why when where who whom whose what which")
ARTICLES = _words("a an the")
PREPOSITIONS = _words(
    "in on at for with without if unless after before during under by from until within since to because although "
    "while once given assuming between per as through over despite besides when about against near inside outside of"
)
DISTINCTIVE = _words(
    """
    the what how which who whom whose why when where does did than is are of and with from my please should
    would could can i you this that it there tell give write list explain to for not show if was were be has
    have will at by define summarize summarise translate describe name compare suggest recommend
    """
)
"""Words that a text must have more of than of FOREIGN ones to count as English."""

FOREIGN = _words(
    "und der das nicht wie ist ein eine auf für los las que qué por para una como cómo les des est une dans pour il di "
    "che della het een van de niet voor não uma em é på och att jag nie się el le la du jest os cual cuál quel "
    "¿ ¡ dos es en den dem mit von zu wo wann warum où quand comment dove quando perché hoe waar"
)

CHAT = _pairs("""
    u: you, ur: your, pls: please, plz: please, thx: thanks, ty: thanks, im: i am, whats: what is, wheres: where
    is, hows: how is, whos: who is, thats: that is, dont: do not, doesnt: does not, didnt: did not, isnt: is
    not, arent: are not, wasnt: was not, werent: were not, cant: can not, cannot: can not, couldnt: could not,
    wouldnt: would not, shouldnt: should not, hasnt: has not, havent: have not, wont: will not, teh: the, hte:
    the, waht: what, whta: what, wich: which, adn: and, wanna: want to, gonna: going to, gotta: have to, kinda:
    kind of, kindly: please, w/: with, w/o: without, &: and, ok: okay, tmrw: tomorrow, tmr: tomorrow
""")
"""Spellings of chats, contractions without an apostrophe."""

NOT = (
    (re.compile(r"\bcan't\b"), "can not"),
    (re.compile(r"\bwon't\b"), "will not"),
    (re.compile(r"\bshan't\b"), "shall not"),
    (re.compile(r"n't\b"), " not"),
    (re.compile(r"\bi'm\b"), "i am"),
    (re.compile(r"'re\b"), " are"),
)
"""Contractions that are written out, except in questions about words."""

CONTRACTIONS = (
    (re.compile(r"'ve\b"), " have"),
    (re.compile(r"'ll\b"), " will"),
    (re.compile(r"'d(?= (?:like|love|rather|appreciate|be|prefer|recommend|suggest)\b)"), " would"),
    (re.compile(r"\b(what|who|where|how|when|why|it|that|there|here|he|she)'s\b"), r"\1 is"),
    (re.compile(r"\blet's\b"), "let us"),
)

SYNONYMS = _pairs("""
    purchase: buy, purchasing: buying, purchased: bought, obtain: get, obtaining: getting, acquire: get,
    commence: start, commencing: starting, begin: start, begins: starts, beginning: starting, began: started,
    begun: started, utilize: use, utilizing: using, assist: help, require: need, requires: needs, required:
    needed, repair: fix, repairing: fixing, mend: fix, mending: fixing, regarding: about, concerning: about,
    till: until, upon: on, approximately: roughly, approx: roughly, permitted: allowed, permit: allow, permits:
    allows, numerous: many, sufficient: enough, attempt: try, reside: live, resides: lives, verify: check,
    choose: select, choosing: selecting, erase: delete, erasing: deleting, quickly: fast, rapidly: fast,
    demonstrate: show, whom: who, whilst: while, amongst: among, inquire: ask, big: large, bigger: larger,
    biggest: largest, shut: close, shutting: closing, frequently: often, amid: during, concisely: briefly, also:
    too, additionally: too, incorrect: wrong, automobile: car, automobiles: cars, physician: doctor, physicians:
    doctors, child: kid, children: kids, film: movie, films: movies, bike: bicycle, bikes: bicycles, telephone:
    phone, television: tv, photograph: photo, photographs: photos, fridge: refrigerator, aeroplane: airplane,
    plane: airplane, planes: airplanes, info: information, exam: test, exams: tests, lawyer: attorney, lawyers:
    attorneys, garbage: trash, rubbish: trash, mom: mother, mum: mother, dad: father, maximum: max, vs: versus,
    percent: %, costs: cost, pros: advantages, benefits: advantages, upsides: advantages, pro: advantage, cons:
    disadvantages, drawbacks: disadvantages, downsides: disadvantages, drawback: disadvantage, downside:
    disadvantage, benefit: advantage, upside: advantage, compose: write, draft: write, enumerate: list, colour:
    color, colours: colors, favourite: favorite, centre: center, theatre: theater, metre: meter, metres: meters,
    litre: liter, litres: liters, grey: gray, programme: program, licence: license, cheque: check, behaviour:
    behavior, neighbour: neighbor, labour: labor, organisation: organization, km: kilometers, kms: kilometers,
    kg: kilograms, kgs: kilograms, cm: centimeters, mm: millimeters, hr: hours, hrs: hours, mins: minutes, secs:
    seconds, lbs: pounds, jan: january, feb: february, aug: august, sept: september, sep: september, oct:
    october, nov: november, dec: december
""")
"""Words that may be exchanged in a question about things, though not in one about words."""

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
_TENS = "ten twenty thirty forty fifty sixty seventy eighty ninety"
NUMBERS = {word: str(number) for number, word in enumerate(_ONES.split())}
NUMBERS |= {word: str(10 * number) for number, word in enumerate(_TENS.split(), 1)}

_NOUN = rf"(?!(?:{'|'.join(sorted(PREPOSITIONS))}) )[^ ,]+"
NOUNS = f"{_NOUN}(?: {_NOUN})*"
CLASSES = {
    "I": "i|we|one|a person",
    "ANYONE": "i|we|one|a person|you(?! (?:feel|work|think|know|like|mean|do|earn|help|sound|see|look|live|are) )",
    "Q": "how|why|when|where|who|whose|what|which|(?:in|at|on|for|from|to|by|with|during) (?:what|which)",
    "ASK": "can|could|will|would|might",
    "SOMEONE": "you|someone|anyone|somebody|anybody|you guys|anyone here",
    "TELL": "tell|show|inform|advise|advise on|explain|describe|clarify|confirm|check|find out|figure out|say|state|specify|"
    "(?:help me|help me to) (?:understand|find out|figure out|know|see)",
    "ME": "me|us|to me|to us|with me|for me",
    "KNOW": "know|understand|learn|find out|figure out|ask|ask you|see|hear|be told|inquire",
    "WANT": "(?:i|we) (?:just |really )?(?:want|wanted|need|needed|wish|would like|would love|should like|am trying|was trying|"
    "was hoping|am hoping|hope|am looking)|wanted|want|need|trying|looking",
    "WONDERING": "wondering|curious|curious (?:about|to know|as to)|unsure|unsure about|(?:not|not really|not quite) sure|"
    "not sure about|interested in knowing|interested to know|asking myself|confused about",
    "WAY": "way|ways|method|procedure|process|approach",
    "GOOD": "best|right|correct|proper|usual|standard|good|recommended|best possible",
    "ALLOWED": "possible|okay|alright|all right|fine|allowed|permitted|permissible|acceptable",
    "REQUEST": "tell|explain|show|give|list|name|write|translate|summarize|summarise|describe|compare|define|recommend|suggest|"
    "provide|generate|calculate|compute|remind|rewrite|outline|sum|convert|compose|draft",
    "NOUNS": NOUNS,
    "GIVING": "write|send|give|show|buy|tell|lend|offer|sell|pay",
    "N": r"\d+|some|several|" + "|".join(NUMBERS),
    "PERIOD": "year|month|day|date|time|century|decade|season",
    "USUALLY": "usually|typically|normally|generally",
    "TERM": "word|term|expression|phrase|idiom|acronym|abbreviation",
    "MADE": "written|invented|founded|discovered|created|composed|painted|built|made|designed|directed|produced|sung",
    "HELLO": "hi|hello|hey|hiya|greetings|good (?:morning|afternoon|evening|day)|yo|okay|alright|so|well|um|uh|hmm|excuse me|"
    "sorry|pardon me|(?:a |one |just a )?quick question|question|just (?:wondering|curious)|out of curiosity|quick one|"
    "random question|also|anyway|btw|by the way|dear assistant",
    "ALL": "there|all|everyone|folks|team|guys|again|assistant",
    "THANKS": "(?:thanks|thank you|thx|many thanks)(?: (?:so|very) much| a (?:lot|bunch|million)| in advance| for (?:your|the|any) "
    "help)*|cheers|much appreciated",
    "START": "please|can|could|would|how|why|when|where|who|whose|what|which|i|do|does|did|is|are|tell|give|quick|any|if",
}
"""Words and phrases that count as one in a rule."""


def _elements(pattern: str) -> Iterator[str]:
    """Yield the parts of a pattern between spaces outside of brackets; brackets of a choice do not capture."""
    depth, part = 0, ""
    for letter in pattern.strip() + " ":
        depth += (letter in "([<") - (letter in ")]>")
        if letter == " " and not depth:
            if part:
                yield re.sub(r"\((?!\?)", "(?:", part)
            part = ""
        else:
            part += letter


def _rule(line: str) -> tuple[re.Pattern[str], str]:
    left, right = line.split("=>")
    found = "^"
    for element in _elements(re.sub(r"\{([A-Z]+)\}", lambda named: f"(?:{CLASSES[named[1]]})", left)):
        inner = element[1:].rstrip("*")[:-1]
        if element == "...":
            found = ""
        elif element in ("_", "__"):
            found += " (.+)" if element == "__" else " (.+?)"
        elif element == "$":
            found += "$"
        elif element[0] in "&~":
            found += f"(?{'=' if element[0] == '&' else '!'} (?:{element[1:]})(?: |$))"
        elif element[0] == "<":
            found += f" ({inner})"
        elif element[0] == "[":
            found += f"(?: (?:{inner}))" + ("*" if element[-1] == "*" else "?")
        else:
            found += r" \?" if element == "?" else f" (?:{element})"
    return re.compile(found + "(?= |$)"), f" {right.strip()}".rstrip()


def rules(text: str) -> tuple[tuple[re.Pattern[str], str], ...]:
    r"""Return the rules of a text, one a line: a pattern, "=>", and the words that stand for what it matches.

    A pattern begins at the start of a sentence, after "..." anywhere. Its elements stand between spaces: a word,
    (one|of these), {CLASS}, [one if there], [as many as there]*, <one|that \1 names>, _ for any words that \2 names
    (__ as many as can be), &(before one of these), ~(not before one of these), $ at the end. "#" begins a comment.
    """
    return tuple(_rule(line) for line in text.splitlines() if "=>" in line and not line.startswith("#"))


def apply(given: tuple[tuple[re.Pattern[str], str], ...], text: str, *, first: bool = False) -> str:
    """Return a sentence after rules, each applied once in their order; after the `first` that matches only, if asked."""
    text = f" {text}"
    for pattern, replacement in given:
        if pattern.pattern[0] != "^":
            text = pattern.sub(replacement, text)
        elif (found := pattern.match(text)) is not None:
            text = found.expand(replacement) + text[found.end() :]
            if first and found.end():
                break
    return " ".join(text.split())


PLAIN = rules(r"""
... e [-] mail => email
... (cell|mobile) phone => cellphone
... prior to => before
... (in|with) (regard|respect|reference|relation) to => about
... on the (subject|topic) of => about
... (in order|so as) to => to
... (due to|owing to|on account of|as a result of) => because of
... in the event (that|of) => if
... provided that => if
... <is|are> not able to => can not
... (at present|at the moment|right now|presently) => now
... as well as => and
... (united states of america|united states|u.s.a|u.s|\^us) => usa
... (united kingdom|u.k) => uk
... no longer => not anymore
... get rid of => remove
... set up => setup
... log in => login
... step by step => stepwise
... the pros and cons => advantages and disadvantages
""")

POLITE = rules(r"""
[please|kindly]* => 
{HELLO} [{ALL}] (,|:|-) => 
(hi|hello|hey|hiya|yo|okay|so|um|uh|hmm) [{ALL}] &{START} => 
would you mind (telling|informing) => tell
would you mind explaining => explain
would you mind showing => show
would you mind giving => give
would you mind listing => list
would you mind writing => write
would you mind summarizing => summarize
(i|we) would (appreciate it|be grateful|be glad|be happy|be thankful) if (you|someone) (could|would|can) [please|kindly] => please
(would|might|are) you [be] able to => can you
(would|is) it [be] possible for you to => can you
would you be so kind as to => can you
would you [be willing to|care to|like to] &{REQUEST} => can you
[,]* [lol|haha|tbh] $ => 
{HELLO} [{ALL}] $ => 
(help|please help|(?:i have|i have got|got) a (?:quick |short )?question(?: for you)?|let me know|i hope you can help) $ => 
(can|could|would) you help [me] [out] [with this] $ => 
... [,]* ({THANKS}) [,]* [{ALL}] $ => 
... [,]* (please|for me please|exactly|by any chance|if you (can|could|know)|if you do not mind|do you know|any (idea|ideas|clue)|i wonder|lol|haha) $ => 
""")
"""Politeness, taken out of a sentence as often as it is there."""

FRAMES = rules(r"""
# questions of yes or no: "?"
[please|{ASK} {SOMEONE}|can you please]* {TELL} [{ME}] (if|whether) [or not] => ?
[please] let me know whether [or not] => ?
{WANT} to [please] {KNOW} (if|whether) [or not] => ?
[i|we] [am|was|are|were|have been]  [just|still] ({WONDERING}|wonder) (if|whether) [or not] => ?
(do|does|would) (you|anyone|anybody|someone|somebody) [here|happen to|perhaps|maybe|by any chance]* know (if|whether) [or not] => ?
(anyone|anybody|someone) know (if|whether) => ?
(can|could|may|might) i [please] (ask|know|inquire) [you] (if|whether) => ?
(any|got any|do you have any|have you got any|have you any) (idea|ideas|clue) [of|about|as to|on] (if|whether) => ?
(i|we) (do|can) not (know|remember|recall) (if|whether) => ?
[please|{ASK} {SOMEONE}]* (is|was) it (true|correct|right|the case|a fact) that => ?
am i right that => ?
# questions after a frame
[please|{ASK} {SOMEONE}|can you please]* {TELL} [{ME}] [exactly] &{Q} => 
[please] let me know ~(when) &{Q} => 
{WANT} to [please] {KNOW} [exactly] &{Q} => 
[i|we] [am|was|are|were|have been] [just|still] ({WONDERING}|wonder) &{Q} => 
(do|does|would) (you|anyone|anybody|someone|somebody) [here|happen to|perhaps|maybe|by any chance]* know [exactly] &{Q} => 
(anyone|anybody|someone) know &{Q} => 
(can|could|may|might) i [please] (ask|know|inquire) [you] &{Q} => 
(any|got any|do you have any|have you got any|have you any) (idea|ideas|clue) [of|about|as to|on] &{Q} => 
(i|we) (do|can) not (know|remember|recall) &{Q} => 
(i forgot|remains unclear|the question is|my question is|question is|it is unclear to me) &{Q} => 
(please|{ASK} {SOMEONE})  &{Q} => 
# things that are asked for
[please|{ASK} {SOMEONE}]* (tell|give|show|inform) (me|us) [of] &(the) => what is
[please|{ASK} {SOMEONE}]* provide [me with|us with] &(the) => what is
[please|{ASK} {SOMEONE}]* (name|find out|look up|state) &(the) => what is
{WANT} to (know|find out) &(the) => what is
[i|we] [am|was] [just] ({WONDERING}) &(the) => what is
(do|does|would) (you|anyone|anybody|someone) [here|happen to|perhaps|maybe|by any chance]* know &(the) => what is
(can|could|may) i [please] know &(the) => what is
(any|got any|do you have any) (idea|clue) [of|about|as to] &(the) => what is
[please|{ASK} {SOMEONE}]* (tell me|give me (?:some )?information|what can you tell me|provide (?:some )?information|talk) (about|on) => tell about
{WANT} (to know|to learn|to hear|information) about => tell about
# requests
[please|{ASK} {SOMEONE}]* &{REQUEST} => 
(can|could|will|would) you please => 
(i|we) (need|want|would like) you to => 
(please) => 
""")
"""Frames that ask for an answer, before the question itself; "?" stands for a question of yes or no."""

HOW = rules(r"""
(what is|what are|what would be) [the|a|some] [{GOOD}] {WAY} (to|of|for|in which {ANYONE} can|{ANYONE} can use to) => how-to
[{GOOD}] (way|method|procedure|process|steps|instructions|directions|guide) (to|for) => how-to
what (do|can|would|could) {ANYONE} [need to|have to|got to] do to => how-to
what (steps|actions) (do|should|must|can) {ANYONE} [need to|have to] (take|follow|do|perform) to => how-to
(what|which) steps are (needed|involved|necessary) (to|for|in) => how-to
(what are|what is) [the] (steps|step|instructions|procedure|process) [to take|to follow|needed|involved|necessary] (to|for|in|of) => how-to
how (do|can|could|would|might) {ANYONE} [best|properly|correctly] go about => how-to
how (do|does|can|could|would|might) {I} ~(not|need|have) [best|properly|correctly] => how-to
how do {ANYONE} ~(not|need|have) [best|properly|correctly] => how-to
how {I} (can|could) ~(not) => how-to
how [is it possible|best] to => how-to
(give|show|tell) me [the|some|a] (instructions|directions|steps|guidance|guide) (on how to|on|for|to) => how-to
(provide|i need) [me with] [the|some] (instructions|directions|steps|guidance) (on how to|on|for|to) => how-to
(teach me|show me|explain|explain to me|tell me) [how] to => how-to
(walk|guide) me through [how to] => how-to
(help me|help|i need help|need help|i need some help) [with] [how to] &(\w+ing) => how-to
(i need help|need help|i am having trouble|having trouble) [to|with] &(\w+ing) => how-to
{WANT} to learn to => how-to
[i|we] [am] not sure how to => how-to
""")
"""Wordings of "how to", before a verb; the first that matches counts."""

MODALS = rules(r"""
# what anyone may, must and should do
? (can|could|may) {I} => ?can
? {I} (can|could|may) => ?can
? (is|would) it [be] {ALLOWED} [for me|for us|for one|for people] to => ?can
? it (is|would be) {ALLOWED} [for me|for us|for one|for people] to => ?can
? (is|would) it [be] (okay|alright|all right|fine) if {I} => ?can
? (am|are) {I} (allowed|permitted) to => ?can
? {I} (am|are) (allowed|permitted) to => ?can
? is there (a|any|some) (way|possibility|option) (to|for me to|for us to|i can|we can|i could|we could) => ?can
? (do|does) {I} (need|have) to => ?must
? {I} (need to|have to|must) => ?must
? must {I} => ?must
? is it (necessary|needed|mandatory|compulsory|obligatory) [for me|for us|for one|for people] to => ?must
? (am|are) {I} (needed|obliged) to => ?must
? should {I} => ?should
? {I} should => ?should
? (is|would) it [be] (advisable|recommended|a good idea|wise) [for me|for us|for one|for people] to => ?should
# what a named subject may and must do
? (is it|it is) possible for _ to => ? \1 can
? (is|are) _ able to => ? \1 can
? _ (is|are) able to => ? \1 can
? (is it|it is) (allowed|permitted) for _ to => ? \1 may
? (is|are) _ (allowed|permitted) to => ? \1 may
? _ (is|are) (allowed|permitted) to => ? \1 may
? (do|does) _ (have|need) to => ? \1 must
? _ (has|have|needs|need) to => ? \1 must
""")
"""Wordings of what one can, may, must and should do; the first that matches counts."""

_NOUNS = {
    "summary": "summarize", "list": "list", "description": "describe", "explanation": "explain", "comparison": "compare",
    "outline": "outline",
}  # fmt: skip
MEASURES = {
    "tall": "height", "high": "height", "deep": "depth", "wide": "width", "heavy": "weight", "old": "age",
    "large": "size", "fast": "speed", "expensive": "price", "long": "length",
}  # fmt: skip
_GIVE = "(give|write|make|provide|produce|create|prepare|generate|i need|i want|i would like|show) [me|us|me with] [a|an|the]"

REQUESTS = rules(
    "\n".join(f"{_GIVE} {noun} (of|for) => {verb}" for noun, verb in _NOUNS.items())
    + "\n"
    + "\n".join(
        f"{_GIVE} (short|brief|concise|quick) {noun} (of|for) => {verb} briefly" for noun, verb in _NOUNS.items()
    )
    + "\n"
    + "\n".join(
        f"briefly {verb} => {verb} briefly\n{verb} _ briefly $ => {verb} briefly \\1" for verb in _NOUNS.values()
    )
    + "\n"
    + "\n".join(f"how {adjective} (is|are) __ => what is {noun} of \\1" for adjective, noun in MEASURES.items())
    + "\n"
    + "\n".join(
        rf"~(what|which|how|is|are|does|the|write|explain|list|calculate) <\w+(?: \w+){{0,3}}> {noun} $ => what is {noun} of \1"
        for noun in set(MEASURES.values())
    )
    + r"""
(sum up|give me the gist of) => summarize
<what|who|when|where> <is|are|was|were> <\w+(?: \w+)?> 's <{NOUNS}> => \1 \2 \4 of \3
(give|tell|show|name|list) [me|us] &({N}) => list
(send|set|give|create|add) [me] [a] reminder to => remind me to
(send|set|give|create|add) <\w+> a reminder to => remind \1 to
(set|create|add) a reminder for <\w+> to => remind \1 to
<{GIVING}> ~(me|us|not|up|out|down) <\w+> &(a|an|the|my|your) _ <about|for|on|in|at|by|from|with|before|after|because|if> => \1 \3 to \2 \4
<{GIVING}> ~(me|us|not|up|out|down) <\w+> &(a|an|the|my|your) <(?:(?! to ).)+> $ => \1 \3 to \2
(what|which) _ (do|would|can|could) you <recommend|suggest> => \2 \1
<write|summarize|explain|list|describe|compare|outline|suggest|recommend> (for me|for us|me|us) => \1
<write|summarize|explain|list|describe|compare|outline|suggest|recommend> _ (for me|for us|to me|to us) $ => \1 \2
write [a|an] <\d+|two|three|four|five|six|seven|eight|nine|ten> [-] <word|sentence|paragraph|line|page> __ => write \3 in \1 \2s
... (using|with) <\d+|two|three|four|five|six|seven|eight|nine|ten> <words|sentences|paragraphs|lines|bullet points> => in \1 \2
<write(?: \w+){0,3}?> <essay|article|paragraph|speech|poem|post|haiku|song> on => \1 \2 about
recommend => suggest
# why, when, who, where
what (is|are|was|were) the (reason|reasons) (why|that|for which|behind why) => why
for (what|which) (reason|reasons) => why
(why is it that|how come|what is the reason) => why
(in|at|on|during) (what|which) &{PERIOD} => what
what <{PERIOD}> _ (in|at|on) $ => what \1 \2
who (is|was) (the one|the person) (who|that) => who
who is it that => who
(which|what) (person|people) => who
what is the name of the (person|man|woman) (who|that) => who
who (was|were) _ <{MADE}> by $ => made \2 \1
by who (was|were) _ <{MADE}> => made \2 \1
who (is|was) the (author|writer) of => made written
who (is|was) the inventor of => made invented
who (is|was) the founder of => made founded
who (is|was) the discoverer of => made discovered
who (is|was) the creator of => made created
who (is|was) the composer of => made composed
who wrote => made written
who <invented|founded|discovered|created|composed|painted|built|made|designed|directed|produced> => made \1
what is the [exact] (location|whereabouts) of => where is
where <is|are> _ (located|situated) => where \1 \2
where (can|could) {I} => where-can
(in|at) (what|which) place => where
<what|how|why|when|where|who|which> (exactly|precisely) => \1
what is the (purpose|use) of => purpose
what (is|are) _ [used] for $ => purpose \1
(which|what) one &(is|are|was) => which
# numbers and measures
[what is] [the] [total] (number|amount|count|quantity) of &(\w+s) => how many
how many _ (are|is) there => how many \1
how many _ (are|is) &(in|on|at) => how many \1
? <is|are> there any => ? \1 there
how much time &(does it take|will it take|would it take|is needed) => how long
how long (does|will|would) it [{USUALLY}] take [for me|me|you|one|us] to => duration
how long (does|will|would) <\w+ing> _ [{USUALLY}] take => duration \1 \2
how long (does|will|would) it take &(\w+ing) => duration
what is the (time|duration) [needed|it takes|taken] (to|for|of) &(\w+ing) => duration
how long (does|do) _ [{USUALLY}] take => duration \1
what is the duration of => duration
how much (is|are) (a|an|the) => what is price of
(how much|what) (does|do) _ cost => what is price of \1
(how much|what) <the .+?> cost ~(of) => what is price of \1
[what is|what are] [the] (price|cost|prices) (of|for|to) => what is price of
how far is _ from __ => what is distance between \2 and \1
how far is it from _ to __ => what is distance between \1 and \2
[what is] [the] distance (between|from) _ (to|and) => what is distance between \1 and
# differences
(how is|how are) _ different from => what is difference between \1 and
(how does|how do) _ differ from => what is difference between \1 and
how do _ and _ differ => what is difference between \1 and \2
[what is|what are] [the] (difference|differences) between => what is difference between
compare _ (with|to|and|versus|against) => compare between \1 and
# needs
... (do|does|will|would) {I} need &(to) => must-be
... (are|is) (needed|necessary) &(to|for) => must-be
... (do|does|will|would) {I} need $ => must-be
... (are|is) needed $ => must-be
... (have|has|need|needs) to => must
"""
)
"""Wordings of requests and questions that mean one thing."""

DEFINE = rules(r"""
define => define
[what is|what are|give me|give|provide] [the|a] (meaning|definition) (of|for) => define
(what is meant by|explain the meaning of|tell me the meaning of) => define
(what does|what do) _ mean [exactly] $ => define \1
what _ means $ => define \1
define [the] [{TERM}] => define
""")
"""Wordings of "what does a word mean"."""

ABOUT_WORDS = re.compile(
    r"\b(?:(?<!\d )(?<!\d - )words?|letters? (?!to\b|for\b|about\b|from\b)|vowels?|syllables?|spell\w*|pronounc\w*|pronunciation|rhym\w*|synonyms?|antonyms?|gramma\w*|"
    r"proofread\w*|rephras\w*|paraphras\w*|rewrit\w*|reword\w*|translat\w*|transliterat\w*|transcri\w*|mean|means|meant|meaning|defin\w*|phrases?|idioms?|"
    r"say|says|saying|said|(?<!\d - )sentence|typos?|acronyms?|abbreviat\w*|stands? for|plural|singular|tense|verbs?|nouns?|adjectives?|adverbs?|"
    r"prepositions?|apostrophes?|punctuation|called|titled?|lyrics|quot\w*|correct this|etymology|(?:french|german|spanish|italian|latin) for|difference "
    r"between (?:an?|the|do|does|is|are|am|to|of|was|were|may|can|could|would|will|shall) and)\b"
)
"""A question about words, in which no word may be exchanged for another."""

TEXT_TASK = re.compile(
    r"\b(?:translat\w*|transliterat\w*|transcri\w*|proofread\w*|rewrit\w*|rephras\w*|paraphras\w*|reword\w*|gramma\w*|"
    r"spelling|pronunciation|correct (?:the|this|these|any|all|my)|verbatim|tokeni[sz]e\w*|part of speech|repeat|synonyms?)\b",
    re.IGNORECASE,
)
"""A task that is done to the words of a text, so that its wording is its content."""

TIME = re.compile(
    r" ((?:(?:on|by|until|since|next|last|this|every) )?(?:monday|tuesday|wednesday|thursday|friday|saturday|sunday)s?|"
    r"tomorrow|today|yesterday|tonight|(?:next|last|this) (?:week|month|year|weekend|morning|afternoon|evening))(?! 's)(?= |$)"
)
"""Expressions of time that may stand anywhere in a simple sentence."""

SUBORDINATE = re.compile(
    r"\b(?:if|when|that|who|which|whose|because|while|unless|although|after|before|since|and|or|than|but|until)\b"
)
VERBS_S = _words(
    """
    means works takes needs contains uses owns owes earns weighs lives belongs opens closes starts ends lasts
    happens comes goes makes sells eats wants likes knows runs stops causes produces offers accepts supports
    includes provides pays charges costs arrives leaves grows affects compares differs exists speaks reads
    writes teaches wins loses becomes gets gives helps keeps looks plays says sees turns allows returns
    """
)
"""Verbs whose "-s" is that of the third person where a text has no auxiliary: "what it costs", "what does it cost"."""
