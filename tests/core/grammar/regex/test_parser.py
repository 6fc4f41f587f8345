"""Regular expressions mean what they mean in Python's `re`."""

from __future__ import annotations

import itertools
import re
import unicodedata
import warnings

import pytest
from hypothesis import given, settings, strategies as st

from graftlm.core.errors import GrammarError
from graftlm.core.grammar.automata import charsets
from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.automata.products import product
from graftlm.core.grammar.budget import limited
from graftlm.core.grammar.regex.parser import parse
from graftlm.core.grammar.spec import Limits, Regex
from tests.grammars import allows, compiled

ALPHABET = "abzABZ019_ .-\né\u0130ſKλ中😀"

ATOMS = st.sampled_from(
    [
        *"abAZ0_",
        r"\d",
        r"\w",
        r"\s",
        r"\D",
        r"\W",
        r"\S",
        ".",
        "é",
        "λ",
        "😀",
        r"\.",
        r"\x61",
        r"\u00e9",
        r"\n",
        r"\060",
    ]
    + ["[a-c]", "[^a-c]", r"[\d_-]", "[]a]", "[^]a]", r"[\w.]", r"[^\W\d]", "[a-zé中]", "[K-k]", "(?i:ss)", "(?s:.)"]
)
COUNTS = st.sampled_from(["*", "+", "?", "*?", "+?", "??", "{2}", "{1,3}", "{,2}", "{2,}", "{0}", "{3,12}?"])


def _compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("|".join),
        st.tuples(inner, COUNTS).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
        inner.map(lambda body: f"({body})"),
        inner.map(lambda body: f"(?i:{body})"),
    )


PATTERNS = st.recursive(ATOMS, _compound, max_leaves=6)
TEXTS = st.lists(st.text(ALPHABET, max_size=6), min_size=10, max_size=20)


def _re_decides(pattern: str, text: str) -> bool:
    """Whether `re` decides in a moment: it tries all ways to divide the text among counts that lie in each other."""
    return len(re.findall(r"\)[*+?{]", pattern)) ** len(text) <= 100_000


@settings(max_examples=150)
@given(PATTERNS, TEXTS, st.data())
def test_a_pattern_matches_the_texts_that_fullmatch_matches(
    pattern: str, texts: list[str], data: st.DataObject
) -> None:
    dfa = Dfa.compile(parse(pattern))
    member = data.draw(st.from_regex(pattern, fullmatch=True))
    for text in [*texts, member, member + "a", member[:-1]]:
        if _re_decides(pattern, text) and not any(0xD800 <= ord(c) < 0xE000 for c in text):
            assert dfa.matches(text.encode()) == (re.fullmatch(pattern, text) is not None), (pattern, text)


@settings(max_examples=75)
@given(st.sampled_from(["", "^"]), PATTERNS, st.sampled_from(["", "$"]), TEXTS)
def test_a_searched_pattern_matches_the_texts_that_contain_it(
    head: str, body: str, tail: str, texts: list[str]
) -> None:
    pattern = f"{head}(?:{body}){tail}"
    dfa = Dfa.compile(parse(pattern, search=True))
    for text in texts:
        expected = re.search(pattern.replace("$", r"\Z"), text) is not None
        assert dfa.matches(text.encode()) == expected, (pattern, text)


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        ("^a|b$", ["ac", "a", "b", "cb"], ["ca", "bc"]),
        ("(^a|b)c", ["acx", "xbc"], ["xac"]),
        ("(?:^|,)x(?:,|$)", ["x", "a,x,b", "x,"], ["ax", "xa"]),
        ("^$", [""], ["a"]),
        ("", ["", "anything"], []),
    ],
)
def test_anchors_bind_the_alternative_they_stand_in(pattern: str, inside: list[str], outside: list[str]) -> None:
    dfa = Dfa.compile(parse(pattern, search=True))
    assert all(dfa.matches(text.encode()) for text in inside)
    assert not any(dfa.matches(text.encode()) for text in outside)


@pytest.mark.parametrize(
    "pattern",
    [
        *("(a|^)b", "b(?:$|1)", "^(?!^ab$).+", "^(?=^a)", "^(?!^$)", "^(?:$|a$)", "((^a)|(b$))?", "(^a$)|(^b)$"),
        *("^(?=^a)(^(?!a1)|b).*$", "(?=a)^.", "(?:^)?a", "(?:$|(?=a)a?)", "^(?!^(?:ab|ba)$)[ab]+$", "^^a$$"),
    ],
)
def test_an_anchor_at_an_end_of_its_alternative_means_the_same_as_in_re(pattern: str) -> None:
    _is_as_in_re(pattern)


_ANCHORED = st.recursive(
    st.sampled_from(["a", "b", "1", ".", "^", "$", ""]),
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from("*+?")).map(lambda parts: f"(?:{parts[0]}){parts[1]}"),
        st.tuples(st.sampled_from("=!"), inner).map(lambda parts: f"(?{parts[0]}{parts[1]})"),
    ),
    max_leaves=6,
)


@settings(max_examples=300)
@given(_ANCHORED)
def test_anchors_and_lookaheads_anywhere_mean_what_they_mean_in_re(pattern: str) -> None:
    try:
        parse(pattern), parse(pattern, search=True)
    except GrammarError:
        return
    _is_as_in_re(pattern, longest=3)


def _is_as_in_re(pattern: str, longest: int = 4) -> None:
    words = ["".join(letters) for length in range(longest + 1) for letters in itertools.product("ab1", repeat=length)]
    found, whole = parse(pattern, search=True), parse(pattern)
    assert [word for word in words if product.matches(found, word) != bool(re.search(pattern, word))] == []
    assert [word for word in words if product.matches(whole, word) != bool(re.fullmatch(pattern, word))] == []


@pytest.mark.parametrize(
    ("pattern", "categories"),
    [
        *((r"\p{L}", {"Lu", "Ll", "Lt", "Lm", "Lo"}), (r"\pN", {"Nd", "Nl", "No"}), (r"\p{Lu}", {"Lu"})),
        *((r"\p{Uppercase_Letter}", {"Lu"}), (r"\p{gc=Zs}", {"Zs"}), (r"[\p{Nd}\p{Pc}]", {"Nd", "Pc"})),
        (r"\p{General_Category=Punctuation}", {"Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po"}),
    ],
)
def test_a_unicode_property_takes_the_characters_of_its_categories(pattern: str, categories: set[str]) -> None:
    complemented = "[^" + pattern[1:] if pattern[0] == "[" else "\\P" + pattern[2:]
    inside, outside = parse(pattern), parse(complemented)
    for code_point in [*range(0x3000), *range(0x10400, 0x10500), *range(0x1D7C0, 0x1D800)]:
        text, taken = chr(code_point), unicodedata.category(chr(code_point)) in categories
        assert product.matches(inside, text) == taken, hex(code_point)
        assert product.matches(outside, text) != taken, hex(code_point)


def test_characters_that_unicode_may_assign_later_are_taken_only_in_a_wide_reading() -> None:
    unassigned = "\u0378"
    for pattern in (r"^\p{L}$", r"^\P{L}$", r"^[^\p{L}]$", r"^[^\P{L}]$"):
        assert not product.matches(parse(pattern, search=True, portable=True), unassigned), pattern
        assert product.matches(parse(pattern, search=True, portable=True, wide=True), unassigned), pattern


@pytest.mark.parametrize("letter", "dws")
@pytest.mark.parametrize("flag", ["", "(?a)"])
def test_categories_hold_the_characters_that_re_puts_in_them(letter: str, flag: str) -> None:
    pattern = rf"{flag}\{letter}"
    dfa = Dfa.compile(parse(pattern))
    for code_point in [*range(0x3000), *range(0x10400, 0x10500), *range(0x1D7C0, 0x1D800)]:
        text = chr(code_point)
        assert dfa.matches(text.encode()) == (re.fullmatch(pattern, text) is not None), hex(code_point)


def test_categories_look_at_all_planes_that_hold_letters() -> None:
    assert re.search(r"[\d\w\s]", "".join(map(chr, range(charsets.LETTERS_END, 0x110000)))) is None


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        ("(?i)straße", "STRAßE", True),
        ("(?a)\\w+", "é", False),
        ("(?x) a b # comment\n c", "abc", True),
        ("a(?#note)b", "ab", True),
        ("(?P<year>\\d{4})-(?<month>\\d\\d)", "2024-11", True),
        ("a{,2}", "aa", True),
        ("a{x}", "a{x}", True),
        ("(?i)k", "\u212a", True),
        (r"(?i)[\w-]", "\u0345", False),
        (r"\N{BULLET}", "\u2022", True),
        ("(?i:a)b", "AB", False),
    ],
)
def test_details_of_the_dialect(pattern: str, text: str, expected: bool) -> None:
    assert Dfa.compile(parse(pattern)).matches(text.encode()) is expected


@pytest.mark.parametrize(
    ("pattern", "position", "reason"),
    [
        (r"(a|b)\1", 5, "a backreference is not supported; write the alternatives"),
        (r"(?P<x>a)\k<x>", 8, "a backreference"),
        ("(?P<x>a)(?P=x)", 8, "a backreference"),
        ("(?:ab)*+", 0, "possessive"),
        ("ab*+", 1, "possessive repeat is not supported; use the plain repeat"),
        ("a(?<=a)b", 1, "a lookbehind .* write the text before it"),
        ("(?<!a)b", 0, "a lookbehind"),
        (r"a\B", 1, r"\\B is not supported"),
        (r"a*\b", 2, r"\\b is supported at the start"),
        (r"(?:a|\bb)", 5, r"\\b is supported at the start"),
        ("(?m)a$", 5, "at line breaks"),
        ("(?:a(?=b)|b)*", 4, "a lookahead inside a repeat"),
        ("a(?=^b)", 1, "add that \\^ or leave this one out"),
        ("(?>a)", 0, "atomic"),
        ("(a)(?(1)b|c)", 3, "conditional"),
        ("a**", 2, "multiple repeat"),
        ("*a", 0, "nothing to repeat"),
        (r"a\b+", 1, "nothing to repeat"),
        (r"\b{2}", 0, "nothing to repeat"),
        ("(ab", 0, "not closed"),
        ("ab)", 2, "closes no group"),
        ("[ab", 0, "not closed"),
        ("[z-a]", 1, "backwards"),
        ("a{3,2}", 1, "minimum above its maximum"),
        ("ab\\", 2, "backslash"),
        (r"\q", 0, "no known escape"),
        (r"\p{Hanoi}", 0, "Unicode property"),
        (r"\p{L", 0, "Unicode property"),
        (r"\p{^L}", 0, "Unicode property"),
        (r"\u{110000}", 0, "last code point"),
        (r"\c1", 0, "no known escape"),
        (r"\x4", 0, "hexadecimal"),
        ("a^b", 1, "ends of the pattern"),
        ("a$b", 1, "ends of the pattern"),
        ("a$\n?", 1, "ends of the pattern"),
        ("(?:^a|b)*", 3, "ends of the pattern"),
        ("a(?i)b", 1, "at its beginning"),
        ("(" * 70 + ")" * 70, 64, "nest deeper"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_its_position(pattern: str, position: int, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason) as refused:
        parse(pattern)
    assert refused.value.position == position


@settings(max_examples=200)
@given(st.text("ab()[]{}|*+?^$\\.-,:<>=!#dwsx01i", max_size=10))
def test_what_re_refuses_is_refused_and_nothing_else_is_raised(pattern: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = re.compile(pattern)
    except (re.error, OverflowError):
        if r"\x{" in pattern:  # a code point here, as in Rust
            return
        expected = None
    try:
        node = parse(pattern)
    except GrammarError:
        return
    assert expected is not None, pattern
    assert node is not None


@pytest.mark.parametrize(
    "pattern",
    [
        *("^(?!a).+", "(?!a)^.+$", "^(?=.*a)(?=.*1).{2,}$", "a(?!b)", "(?=ab)a", "^(?!ab$|ba$)[ab]+$", "x|^(?!a)b"),
        *("^(?:a(?!b)|b)x?", "^(?!.*aa)[ab]*$", "^(?!(?!a)b).", "(?!a)b|1(?=a)", "^(?!^a|b$)[ab]*$", "(?!a(?=b))[ab]+"),
    ],
)
def test_a_lookahead_restricts_what_follows_to_the_end_of_the_text(pattern: str) -> None:
    words = ["".join(letters) for length in range(6) for letters in itertools.product("ab1", repeat=length)]
    found, whole = parse(pattern, search=True, portable=True), parse(pattern)
    assert [word for word in words if product.matches(found, word) != bool(re.search(pattern, word))] == []
    assert [word for word in words if product.matches(whole, word) != bool(re.fullmatch(pattern, word))] == []


@pytest.mark.parametrize(
    ("pattern", "text"),
    [(r"\cJ", "\n"), (r"[\cA-\cc]", "\2"), (r"\u{1F600}", "😀"), (r"[\u{61}-\u{63}]", "b"), (r"\x{0022}", '"')],
)
def test_code_points_and_control_characters_are_spelled_as_in_other_dialects(pattern: str, text: str) -> None:
    assert product.matches(parse(pattern), text)


@pytest.mark.parametrize("pattern", [r"^[\s\S]$", r"^[\W\w]$"])
@pytest.mark.parametrize("text", ["\x1c", "\x85", "\ufeff", "é", "٠"])
def test_a_class_and_its_opposite_are_every_character_in_each_dialect(pattern: str, text: str) -> None:
    assert product.matches(parse(pattern, search=True, portable=True), text)
    assert not product.matches(parse(pattern.replace("[", "[^"), search=True, portable=True, wide=True), text)


def test_an_empty_class_is_that_of_ecma_script_where_no_other_dialect_reads_it() -> None:
    assert product.matches(parse("^a[^]$", search=True, portable=True), "a\n")
    assert [product.matches(parse("^a[]|b", search=True, portable=True), text) for text in ("a", "b")] == [False, True]


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("Script=Greek", "λ", "a"),
        ("sc=Grek", "λ", "a"),
        ("Script_Extensions=Han", "中", "a"),
        ("Han", "中", "a"),
        ("scx=Deva", "क", "a"),
        ("Emoji_Presentation", "😀", "a"),
        ("Alphabetic", "é", "1"),
        ("ASCII", "\0", "é"),
        ("Alnum", "1", "-"),
        ("IsCyrillic", "я", "a"),
    ],
)
def test_properties_are_those_of_unicode(name: str, inside: str, outside: str) -> None:
    for pattern, there, elsewhere in ((rf"^\p{{{name}}}$", inside, outside), (rf"^\P{{{name}}}$", outside, inside)):
        for wide in (False, True):
            found = parse(pattern, search=True, portable=True, wide=wide)
            assert [product.matches(found, text) for text in (there, elsewhere)] == [True, False]


def test_a_property_of_posix_is_one_of_ascii_where_dialects_differ() -> None:
    narrow, wide = (parse(r"^\p{Alnum}$", search=True, portable=True, wide=wide) for wide in (False, True))
    assert [product.matches(narrow, text) for text in ("a", "é")] == [True, False]
    assert product.matches(wide, "é")


@pytest.mark.parametrize("pattern", ["(?:^)*a", "(?:^){2}a", "(?:(?=a))+a", "(?:(?!a))*ab", "(?!b)+."])
def test_an_anchor_or_lookahead_alone_in_a_group_may_be_repeated(pattern: str) -> None:
    for text in ("", "a", "b", "ab", "ba"):
        assert product.matches(parse(pattern), text) == bool(re.fullmatch(pattern, text)), text


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            r"\bab\b",
            r"a\b",
            r"\b",
            r"\ba|b\b",
            r"^\ba",
            r"^[ab]{1,2}\b[ -]?$",
            r"(?:a|b-)\b[ab ]*",
            r"ab\b$",
            r"\b\bb",
        ),
        *(r"(?!a\b)[ab ]+", r"^(?![ab]+\b)[ab ]*b", r"[ab ](?=b)\b", r"\b[ab]+\b[ab -]*", r"(?i:a\b)-"),
    ],
)
def test_a_boundary_of_a_word_is_where_it_is_in_re(pattern: str) -> None:
    words = ["".join(letters) for length in range(6) for letters in itertools.product("ab -", repeat=length)]
    found, whole = parse(pattern, search=True), parse(pattern)
    assert [word for word in words if product.matches(found, word) != bool(re.search(pattern, word))] == []
    assert [word for word in words if product.matches(whole, word) != bool(re.fullmatch(pattern, word))] == []


def test_a_boundary_that_dialects_do_not_share_is_excluded_or_with_wide_included() -> None:
    narrow, wide = (parse(r"^a\b", search=True, portable=True, wide=wide) for wide in (False, True))
    assert [product.matches(narrow, text) for text in ("a", "a-", "ab", "aé")] == [True, True, False, False]
    assert [product.matches(wide, text) for text in ("a", "a-", "ab", "aé")] == [True, True, False, True]


@pytest.mark.parametrize("text", ["«a»", "“a”", "a…", "(a)", "a 😀"])
def test_punctuation_beyond_ascii_ends_words(text: str) -> None:
    assert product.matches(parse(r"\ba\b", search=True, portable=True), text)


def test_a_boundary_of_a_word_takes_few_states() -> None:
    assert len(product.product(parse(r"\ba\b", search=True, portable=True)).rows) < 200
    parse(r"https?://[a-z.]{1,30000}\.[a-z()]{1,6}\b[a-z()/]*")
    assert parse(r"\b" * 3000 + "a") == parse(r"\ba")


def test_a_refused_end_is_also_one_before_the_last_line_break() -> None:
    found = parse(r"^(?!a$)[a\n]*$", search=True, portable=True)
    assert [product.matches(found, text) for text in ("a", "a\n", "aa", "a\n\n")] == [False, False, True, True]


@pytest.mark.parametrize(
    "pattern", ["(?:(?=a)a|b)" * 40, "(^|)" * 40 + "a", "(?:^a|b?)" * 30, "(?=(?=.*a)b)" * 200 + "b*"]
)
def test_alternatives_with_anchors_and_lookaheads_do_not_multiply(pattern: str) -> None:
    with limited(Limits(seconds=5)):
        try:
            parse(pattern), parse(pattern, search=True)
        except GrammarError as error:
            assert error.position is not None, error


def test_a_wide_reading_matches_whatever_some_dialect_matches() -> None:
    for text, pattern in [("٤", r"^\d$"), ("a\n", "^a$"), ("\u2028", "^.$"), ("\u00e9", r"^\w$")]:
        assert product.matches(parse(pattern, search=True, portable=True, wide=True), text)
        assert not product.matches(parse(pattern, search=True, portable=True), text)
    refused = parse(r"^(?!\d)", search=True, portable=True)
    assert not product.matches(refused, "٤")  # a digit in some dialect


@pytest.mark.parametrize(
    ("pattern", "matched", "others"),
    [
        (r"^x(?i)abc$", ["xabc", "xABC"], ["XABC"]),
        (r"^(?!(?i)aws)[A-Za-z]+$", ["aw", "XAWS"], ["aws", "AwS1", "AWSome"]),
        (r"^((?i)a|b)c$", ["ac", "Ac", "Bc"], ["aC"]),
        (r"^[\uE000-\uFFFD\uD800\uDC00-\uDBFF\uDFFF]$", ["\ue000", "\U00010000", "\U0010ffff"], ["a"]),
        (r"^[\w- &]+$", ["a-b &"], ["a+b", ""]),
        (r"^[a-\d]$", ["a", "-", "5"], ["b"]),
    ],
)
def test_in_schemas_what_only_other_dialects_take_means_what_it_means_to_all_of_them(
    pattern: str, matched: list[str], others: list[str]
) -> None:
    node = parse(pattern, search=True, portable=True)
    assert [text for text in matched + others if product.matches(node, text)] == matched
    with pytest.raises(GrammarError, match="use ?|put the - last|swap its ends"):
        parse(pattern)


@pytest.mark.parametrize("end", [r"\Z", r"\z"])
def test_in_schemas_the_ends_of_the_text_may_be_written_as_python_and_rust_write_them(end: str) -> None:
    node = parse(rf"\Aa.*{end}", search=True, portable=True)
    assert [text for text in ("a", "abc", "ba", "a\n", "a\nb") if product.matches(node, text)] == ["a", "abc"]
    refused = parse(rf"\Aa{end}", search=True, portable=True, wide=True)
    assert product.matches(refused, "a\n")  # a match where the end may stand before a line break


def test_a_class_that_dialects_read_differently_is_refused() -> None:
    with pytest.raises(GrammarError, match="put the - last"):
        parse(r"[\d-a-z]", search=True, portable=True)


@pytest.mark.parametrize(
    "pattern",
    [
        *(r"a$", r"a\Z", r"(?:a|b$)", r"(?=a$)a\n", r"(?!a$)[ab]\n?", r"(?!a\Z)[ab]\n?", r"(?!.*a$)[ab]+\n?"),
        *(r"a(?!\Z)\n", r"(?!^$)\n?a?", r"a\b$", r"(?=.*b$)[ab\n]*"),
    ],
)
def test_the_dollar_holds_before_a_line_break_that_ends_the_text_as_well(pattern: str) -> None:
    grammar = compiled(Regex(pattern))
    for text in ("", "\n", "a", "a\n", "b", "b\n", "a\n\n", "aa\n", "ab\n", "ba\n", "b\nb", "a\nb"):
        assert allows(grammar, text) == (re.fullmatch(pattern, text) is not None), text


def test_characters_that_scripts_share_are_told_apart_by_no_version_of_unicode() -> None:
    for pattern in (r"^\p{scx=Deva}$", r"^\P{scx=Deva}$"):
        narrow, wide = (parse(pattern, search=True, portable=True, wide=wide) for wide in (False, True))
        assert [product.matches(found, "\u1cf5") for found in (narrow, wide)] == [False, True]


@pytest.mark.parametrize("pattern", [r"^\ud83d\ude00$", r"^[a\ud83d\ude00]$"])
def test_a_pair_of_surrogates_is_a_character_in_some_dialects_only(pattern: str) -> None:
    narrow, wide = (parse(pattern, search=True, portable=True, wide=wide) for wide in (False, True))
    assert [product.matches(found, "😀") for found in (narrow, wide)] == [False, True]
    refusing = parse(r"^[^\ud83d\ude00]$", search=True, portable=True)
    assert [product.matches(refusing, text) for text in ("😀", "a")] == [False, True]


@pytest.mark.parametrize(
    ("pattern", "texts", "others"),
    [
        ("abc+", ["abc", "abcc"], ["abcabc", "ab"]),
        ("ab{2}c?d", ["abbd", "abbcd"], ["ababd"]),
        ("ab{c", ["ab{c"], ["abc"]),  # braces that hold no counts
        ("a-b: c*", ["a-b: ", "a-b: cc"], ["a-b: c c"]),
        ("ab(?#twice)?c", ["ac", "abc"], ["c"]),  # what stands between does not count
        ("(?x: a b *) c d", ["a c d", "abb c d"], ["a b c d"]),
        ("(?i:ab)ab", ["ABab", "abab"], ["abAB"]),
        ("ab|cd|", ["ab", "cd", ""], ["abcd", "abd"]),
    ],
)
def test_a_quantifier_repeats_the_last_of_several_letters(pattern: str, texts: list[str], others: list[str]) -> None:
    node = parse(pattern)
    assert all(product.matches(node, text) for text in texts)
    assert not any(product.matches(node, text) for text in others)
    assert all(re.fullmatch(pattern, text) for text in texts)
