"""Formats accept what their RFC does, and nothing else."""

from __future__ import annotations

import random

import pytest
from jsonschema import FormatChecker

from graftlm.core.grammar.automata.dfa import Dfa
from graftlm.core.grammar.automata.endings import shortest_ending
from graftlm.core.grammar.automata.products import product
from graftlm.core.grammar.schema.algebra.formats import FORMATS
from graftlm.core.grammar.schema.algebra.text_language import format_node

GOOD = {
    "date": ["2024-02-29", "2000-02-29", "1999-12-31", "0001-01-01"],
    "time": ["00:00:00Z", "23:59:59.123+01:30", "08:30:06z"],
    "date-time": ["2024-02-29T12:00:00Z", "1937-01-01t12:00:27.87+00:20"],
    "duration": ["P1Y2M3DT4H5M6S", "PT36H", "P2W", "P0D"],
    "email": ["joe.bloggs@example.com", "te~st@localhost", "a@b.c"],
    "hostname": ["a", "www.example.com", "a" * 63 + ".com", "x--y.xn", "xn"],
    "ipv4": ["0.0.0.0", "255.255.255.255", "10.20.30.40"],
    "ipv6": ["::", "::1", "1:2:3:4:5:6:7:8", "1::d6:192.168.0.1", "1:2:3:4:5:6:7::"],
    "ipvanyaddress": ["10.20.30.40", "::1"],
    "uuid": ["2eb8aa08-AA98-11ea-b4aa-73b441d16380"],
    **{f"uuid{i}": [f"2eb8aa08-AA98-{i}1ea-b4aa-73b441d16380"] for i in range(1, 9)},
    "uri": ["http://a.b/?c=d#e", "urn:x:y", "ldap://[2001:db8::7]/c=GB?one", "mailto:a@b"],
    "uri-reference": ["", "/a", "../b?c", "#d", "http://a"],
    "json-pointer": ["", "/a~0b/~1", "/"],
    "relative-json-pointer": ["0", "1/a", "2#"],
    "base64": ["", "YQ==", "YWJj"],
    "base64url": ["", "YQ", "_-8="],
    "base16": ["", "00FF"],
    "iri": ["http://ƒøø.com/?x=é", "urn:ü"],
    "iri-reference": ["", "/é", "http://ü.de"],
    "uri-template": ["", "http://a/{b}/{?c*,d:3}", "{+x.y}"],
    "idn-email": ["실례@실례", "a@b.c", "jörg@example.de"],
    "idn-hostname": ["실례", "bücher.de", "a.b"],
    "regex": ["", "^[a-z]+$", r"\\d{2,40}|(?:a|b)*", "[^a-z_]"],
}
BAD = {
    "date": ["2023-02-29", "1900-02-29", "2024-04-31", "2024-13-01", "0000-01-01", "2024-1-1"],
    "time": ["24:00:00Z", "12:00:00", "23:59:60Z", "12:00:00+24:00"],
    "date-time": ["2024-02-30T12:00:00Z", "2024-01-01 12:00:00Z"],
    "duration": ["P", "PT", "P1Y2D", "PT0.5S", "P1W2D"],
    "email": ["a", "@b", "a@", ".a@b", "a..b@c", "a@-b"],
    "hostname": ["", "-a", "a-", "a_b", "a.", "xn--x", "a" * 64, ".".join(["a" * 63] * 4)],
    "ipv4": ["1.2.3", "256.0.0.0", "01.2.3.4"],
    "ipv6": ["1::2::3", "12345::", "1:2:3:4:5:6:7", "1:2:3:4:5:6:7:8::", ":1"],
    "ipvanyaddress": ["1.2.3", "::1/64"],
    "uuid": ["2eb8aa08aa9811eab4aa73b441d16380", "2eb8aa08-aa98-11ea-b4ga-73b441d16380"],
    **{
        f"uuid{i}": ["2eb8aa08-aa98-91ea-b4aa-73b441d16380", f"2eb8aa08-aa98-{i}1ea-c4aa-73b441d16380"]
        for i in range(1, 9)
    },
    "uri": ["//a", "a b:c", "http://a b", "http://a/%zz"],
    "uri-reference": ["\\", "1:b:c", "/a b"],
    "json-pointer": ["a", "/~2"],
    "relative-json-pointer": ["-1", "01", "1#/a"],
    "base64": ["Y", "YQ=", "Y===", "_-8="],
    "base64url": ["Y", "YQ=", "+/8="],
    "base16": ["0", "ff"],
    "iri": ["//a", "a b:ü"],
    "iri-reference": ["\\", "a b"],
    "uri-template": ["{", "{a", "a}", "a b"],
    "idn-email": ["a", "@b", "a@"],
    "idn-hostname": ["", "-a", "a b", "xn--x"],
    "regex": ["(", "[a", "a{", "*a", "[z-a]"],
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_accepts_and_rejects(name: str) -> None:
    node = format_node(name)
    assert [text for text in GOOD[name] if not product.matches(node, text)] == []
    assert [text for text in BAD[name] if product.matches(node, text)] == []


# jsonschema's checkers of these two want no offset, and no 0 inside a number
@pytest.mark.parametrize("name", sorted(set(FORMATS) & set(FormatChecker.checkers) - {"time", "relative-json-pointer"}))
def test_texts_of_a_format_made_at_random_pass_the_checker_of_jsonschema(name: str) -> None:
    dfa, rng, checker = Dfa.compile(format_node(name)), random.Random(0), FormatChecker([name])
    bytes_of = [[byte for byte in range(256) if dfa.table[state, dfa.classes[byte]]] for state in range(dfa.num_states)]
    for _ in range(300):
        place, data = dfa.start, bytearray()
        while bytes_of[place[0]] and not (dfa.accepting[place[0]] and rng.random() < 0.1):
            data.append(rng.choice(bytes_of[place[0]]))
            place = dfa.step(place, data[-1])
            assert place is not None
            if len(data) > 60:
                data += shortest_ending(dfa, place)
                break
        assert checker.conforms(data.decode(), name), data.decode()
