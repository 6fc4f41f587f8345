"""Names of the micro-world: invented words, everyday names, codes, words of other scripts.

Every name belongs to one split by its checksum, so that no name of a held-out case was ever seen
in training, independent of the generator and the order.
"""

from __future__ import annotations

import random
import zlib
from typing import Literal

Split = Literal["train", "valid", "test"]


def words(text: str) -> tuple[str, ...]:
    """Return the words of a pool, written as one text."""
    return tuple(text.split())


_ONSETS = words(
    "b c d f g h j k l m n p r s t v w z b d f g k l m n r s t v br ch cr dr fl fr gl gr kr pl pr sh sl st th tr"
)
_VOWELS = words("a e i o u a e i o ai ea ee ia io oa ou y")
_CODAS = ["", "", "", "", "n", "r", "s", "l", "th", "nd", "x", "m", "ck", "rt", "ss", "ng", "lin", "ton", "ville"]

FIRST_NAMES = words(
    "Ada Alan Alice Amir Amy Ana Andrew Anna Anton Aria Ben Beth Bob Boris Carl Carla Carlos Chen Clara Dana Daniel "
    "David Diana Diego Dora Elena Eli Ella Emil Emma Erik Eva Felix Fiona Frank George Grace Hana Hans Helen Henry "
    "Hugo Ida Igor Ines Irene Isaac Ivan Jack James Jane Jin John Jonas Julia Karim Kate Kenji Laila Laura Leo Lena "
    "Lily Linda Lucas Lucy Maria Mark Marta Mary Max Maya Mei Mia Miguel Mila Mina Nadia Nina Noah Nora Olga Oliver "
    "Omar Oscar Paul Paula Peter Petra Priya Rafael Ravi Rita Robert Rosa Ruth Sam Sara Simon Sofia Stefan Sven Tara "
    "Theo Thomas Tim Tina Tom Uma Vera Victor Viola Walter Wendy Xavier Yara Yuki Zara Zoe"
)
LAST_NAMES = words(
    "Adams Ahmed Anderson Bauer Becker Bell Berg Brown Carter Castro Clark Cohen Costa Cruz Davis Diaz Evans Fischer "
    "Ford Garcia Gray Green Hall Hansen Hill Ito Ivanov Jensen Jones Keller Khan Kim King Klein Kumar Lee Lind Lopez "
    "Martin Meyer Mills Moore Moreau Mori Nakamura Nguyen Novak Okafor Olsen Park Patel Perez Petrov Reed Rivera "
    "Rossi Roy Santos Sato Schmidt Silva Singh Smith Stone Suzuki Tanaka Taylor Torres Turner Vogel Wagner Walker "
    "Wang Weber White Wilson Wolf Wong Wright Young Zhang"
)
CITIES = words(
    "Amsterdam Athens Austin Bangkok Barcelona Beijing Bergen Berlin Bogota Boston Bremen Brussels Budapest Cairo "
    "Calgary Chicago Copenhagen Dakar Dallas Delhi Denver Dublin Florence Geneva Ghent Glasgow Hamburg Hanoi Havana "
    "Helsinki Istanbul Jakarta Kyoto Lagos Leeds Lima Lisbon London Lyon Madrid Manila Marseille Miami Milan Montreal "
    "Moscow Munich Nairobi Naples Oslo Ottawa Oxford Paris Porto Prague Quito Riga Rome Rotterdam Salzburg Santiago "
    "Seattle Seoul Seville Sofia Stockholm Sydney Tallinn Tokyo Toronto Turin Utrecht Valencia Venice Vienna Vilnius "
    "Warsaw York Zagreb Zurich"
)
_CJK = "你好啊集团公司东方科技海天文星辰龙马金银山水火木土大小中国京上北南西明月光华新世界人民和平安长江河湖"
_KANA = "こんにちは株式会社さくらひかりあおいやまかわそらうみつきほしはなゆきまつたけうめカタナミライソニオトヨホンダ"
_CYRILLIC = "абвгдежзиклмнопрстуфхцчшэюя"
_GREEK = "αβγδεζηθικλμνξοπρστυφχψω"


def split_of(name: str) -> Split:
    """Return the split of a name: 8 of 10 train, one valid, one test."""
    bucket = zlib.crc32(name.lower().encode()) % 10
    return "train" if bucket < 8 else "valid" if bucket == 8 else "test"


def syllables(rng: random.Random, count: int | None = None) -> str:
    """Return an invented lower-case word of one to four syllables."""
    count = count or rng.choice((2, 2, 2, 2, 2, 3, 3, 3, 4))
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(count)) + rng.choice(_CODAS)


class Names:
    """Draws names of one split. `rng` decides everything: the same seed gives the same names."""

    def __init__(self, rng: random.Random, split: Split) -> None:
        self.rng = rng
        self.split = split

    def word(self) -> str:
        """Return an invented lower-case word."""
        while split_of(word := syllables(self.rng)) != self.split:
            pass
        return word

    def invented(self) -> str:
        """Return an invented capitalised name."""
        return self.word().capitalize()

    def person(self) -> str:
        """Mostly an invented first name; sometimes an everyday one, sometimes first and last name."""
        dice = self.rng.random()
        if dice < 0.62:
            return self.invented()
        if dice < 0.80:
            return f"{self.invented()} {self.invented()}"
        first = self.rng.choice(FIRST_NAMES)
        # everyday names are seen in training: a held-out name needs an invented part
        if self.split != "train" or dice < 0.90:
            return f"{first} {self.invented()}"
        return first if dice < 0.95 else f"{first} {self.rng.choice(LAST_NAMES)}"

    def place(self) -> str:
        dice = self.rng.random()
        if dice < 0.80 or (self.split != "train" and dice < 0.88):
            return self.invented()
        if dice < 0.88:
            return self.rng.choice(CITIES)
        return f"{self.rng.choice(('New', 'Port', 'Saint', 'North', 'East', 'Lake', 'Mount', 'Old'))} {self.invented()}"

    def company(self) -> str:
        suffix = self.rng.choice(("", "", " Works", " Labs", " Trading", " Bank", " Foods", " Motors", " Group"))
        return self.invented() + suffix

    def code(self) -> str:
        """Return a badge or order code such as KX-4471."""
        letters = "".join(self.rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(self.rng.choice((1, 2, 2, 3))))
        digits = "".join(self.rng.choice("0123456789") for _ in range(self.rng.choice((2, 3, 4, 4))))
        return letters + self.rng.choice(("-", "-", "", "/")) + digits

    def foreign(self) -> str:
        """Return a word in another script, for copying by bytes."""
        script = self.rng.choice((_CJK, _CJK, _KANA, _KANA, _CYRILLIC, _GREEK, "äöüßéèçñåøłžš" + "aeinrst"))
        while split_of(word := "".join(self.rng.choice(script) for _ in range(self.rng.randint(2, 9)))) != self.split:
            pass
        return word
