"""What can be true of somebody or something in the micro-world, and how it is said and asked.

An attribute has a label ("job"), field names that programs give it ("occupation"), a value type, a
pool of values, sentences that state it and questions that ask for it. No attribute hangs on one
phrasing: each has its own sentences and questions beside the ones common to all.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from bench.sprout.names import Names, words

Kind = Literal["person", "place", "company"]
ValueType = Literal["str", "int", "bool", "list"]


@dataclass(frozen=True)
class Attribute:
    """One property. `say` and `ask` are templates over {n} (the subject) and {v} (the value).

    `pool` holds the values of a closed class (it can then be asked for as a Literal); an open
    class draws from `make`. A bool has `say` for true and `deny` for false, and `claim` is the
    field's name in words.
    """

    key: str
    kind: Kind
    type: ValueType
    label: str
    fields: tuple[str, ...]
    say: tuple[str, ...]
    ask: tuple[str, ...]
    pool: tuple[str, ...] = ()
    make: Callable[[Names], Any] | None = None
    deny: tuple[str, ...] = ()

    def draw(self, names: Names, among: tuple[str, ...] = ()) -> Any:
        """A value: str, int, bool or list[str]; out of `among` where that is given."""
        if among:
            return names.rng.choice(among)
        if self.type == "bool":
            return names.rng.random() < 0.5
        if self.make is not None:
            return self.make(names)
        if self.type == "str" and names.rng.random() < 0.05:
            return names.word()  # what is read must be copied, known or not
        if self.type == "list":
            return names.rng.sample(self.pool, names.rng.choice((2, 2, 3, 3, 4)))
        return names.rng.choice(self.pool)

    def sentence(self, rng: random.Random, subject: str, value: Any) -> str:
        """State the fact in one of the attribute's ways."""
        if self.type == "bool":
            return rng.choice(self.say if value else self.deny).format(n=subject)
        spoken = spoken_list(value) if isinstance(value, list) else str(value)
        common = COMMON_SAY_MANY if isinstance(value, list) else COMMON_SAY
        ways = self.say if rng.random() < 0.8 else common
        return rng.choice(ways).format(n=subject, v=spoken, label=self.label, Label=self.label.capitalize())

    def question(self, rng: random.Random, subject: str) -> str:
        ways = self.ask if self.type == "bool" or rng.random() < 0.75 else COMMON_ASK
        return rng.choice(ways).format(n=subject, label=self.label, Label=self.label.capitalize())


def spoken_list(items: list[str]) -> str:
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def spoken(value: Any) -> str:
    """A value as it is written in a plain answer."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(value) if isinstance(value, list) else str(value)


COMMON_SAY = (
    "The {label} of {n} is {v}.",
    "{n}'s {label} is {v}.",
    "As for {n}, the {label} is {v}.",
    "{Label} of {n}: {v}.",
)
COMMON_SAY_MANY = ("The {label} of {n} are {v}.", "{Label} of {n}: {v}.")
COMMON_ASK = (
    "What is the {label} of {n}?",
    "What is {n}'s {label}?",
    "Tell me the {label} of {n}.",
    "Name the {label} of {n}.",
    "{n}: what is the {label}?",
    "Give the {label} of {n}.",
)

_JOBS = words(
    "baker pilot nurse weaver teacher miner farmer singer lawyer chemist painter cook tailor sailor judge clerk poet "
    "guard doctor smith actor architect barber beekeeper bookseller butcher captain carpenter dancer dentist diver "
    "driver editor electrician engineer firefighter fisher florist gardener glassblower historian hunter jeweller "
    "journalist librarian mason mechanic merchant miller musician optician organist pharmacist photographer physicist "
    "plumber potter printer sculptor shepherd surgeon translator waiter welder writer zookeeper"
) + (
    "data scientist",
    "bus driver",
    "taxi driver",
    "graphic designer",
    "ship builder",
    "history teacher",
    "software engineer",
    "night guard",
    "wedding planner",
    "product manager",
)
_COLOURS = words(
    "red blue green black white yellow purple orange brown grey pink teal silver gold violet crimson turquoise beige"
)
_PETS = words(
    "cat dog parrot horse rabbit turtle goat ferret hamster owl canary donkey duck falcon fox frog gecko goose "
    "hedgehog lizard llama mouse otter peacock pigeon pony raven sheep snail snake spider squirrel swan toad crow "
    "lamb"
) + (
    "guinea pig",
    "golden retriever",
    "black cat",
    "tree frog",
    "sheep dog",
)
_FRUITS = words(
    "apples pears plums grapes lemons figs cherries melons dates peaches apricots bananas beans berries cabbages "
    "carrots chestnuts cucumbers garlic hazelnuts kiwis leeks lentils limes mangoes mushrooms olives onions oranges "
    "papayas peas peppers potatoes pumpkins radishes raisins spinach tomatoes turnips walnuts"
)
_INSTRUMENTS = words(
    "accordion banjo bassoon cello clarinet drums flute guitar harmonica harp horn lute mandolin oboe organ piano "
    "saxophone sitar trombone trumpet tuba ukulele viola violin xylophone"
)
_DRINKS = words(
    "ale beer chai cider cocoa coffee cola espresso juice lemonade mead milk rum tea tonic water whisky wine"
) + (
    "green tea",
    "black coffee",
    "orange juice",
    "red wine",
    "hot chocolate",
    "mineral water",
)
_HOBBIES = words(
    "archery boxing chess climbing cooking cycling dancing drawing fencing fishing gardening golf hiking juggling "
    "knitting painting photography pottery reading rowing running sailing singing skating skiing surfing swimming "
    "tennis weaving yoga"
)
_LANGUAGES = words(
    "Arabic Basque Bengali Chinese Czech Danish Dutch English Finnish French German Greek Hebrew Hindi Hungarian "
    "Irish Italian Japanese Korean Latin Norwegian Persian Polish Portuguese Russian Spanish Swedish Turkish Urdu "
    "Welsh"
)
_SUBJECTS = words(
    "algebra art biology chemistry drama economics geography geometry grammar history law logic music physics"
)
_MOODS = words("happy sad angry calm bored proud nervous curious tired cheerful")
_LEVELS = words("beginner intermediate advanced expert")
_PRODUCTS = words(
    "amber barrels bells boats books bread bricks candles carpets cement cheese clocks cloth coal copper glass gloves "
    "hats honey iron jam lace lamps leather linen mirrors paper pearls porcelain ropes salt shoes silk soap steel "
    "sugar swords tiles tin tobacco toys wool"
)
_CLIMATES = words("mild dry humid cold hot windy rainy snowy foggy sunny")
_LANDMARKS = words(
    "abbey aqueduct bridge castle cathedral observatory zoo fountain garden harbour library lighthouse mill museum "
    "opera palace park statue temple theatre university"
) + ("clock tower",)
_SECTORS = words("banking farming shipping mining software energy fashion tourism insurance transport medicine media")


def _int(low: int, high: int) -> Callable[[Names], int]:
    return lambda names: names.rng.randint(low, high)


def _other_person(names: Names) -> str:
    return names.person()


ATTRIBUTES: tuple[Attribute, ...] = (
    Attribute(
        "age",
        "person",
        "int",
        "age",
        ("age", "age_in_years", "years_old"),
        (
            "{n} is {v} years old.",
            "{n} turned {v} last spring.",
            "At {v}, {n} is full of plans.",
            "{n} is aged {v}.",
            "{n} celebrated birthday number {v}.",
            "{n}, {v}, is well known here.",
            "{n} has just turned {v}.",
        ),
        ("How old is {n}?", "What age is {n}?", "At what age is {n}?", "How many years old is {n}?"),
        make=_int(18, 97),
    ),
    Attribute(
        "city",
        "person",
        "str",
        "city",
        ("city", "home_city", "hometown", "residence", "location", "lives_in"),
        (
            "{n} lives in {v}.",
            "{n} has a house in {v}.",
            "The home of {n} is in {v}.",
            "{n} moved to {v}.",
            "{n} settled in {v} long ago.",
            "{n} comes from {v}.",
            "You can find {n} in {v}.",
            "{n} rents a flat in {v}.",
        ),
        (
            "Where does {n} live?",
            "In which city does {n} live?",
            "What is the home city of {n}?",
            "Where is {n} from?",
            "Which city is the home of {n}?",
            "Where is the home of {n}?",
        ),
        make=Names.place,
    ),
    Attribute(
        "job",
        "person",
        "str",
        "job",
        ("job", "occupation", "profession", "job_title", "role"),
        (
            "{n} works as a {v}.",
            "{n} is a {v} by trade.",
            "{n} earns a living as a {v}.",
            "{n} is employed as a {v}.",
            "{n} has been a {v} for years.",
            "{n} trained to be a {v}.",
            "{n} is a {v}.",
        ),
        (
            "What is the profession of {n}?",
            "What does {n} work as?",
            "What does {n} do for a living?",
            "What is {n}'s occupation?",
            "Which job does {n} have?",
            "What kind of work does {n} do?",
        ),
        pool=_JOBS,
    ),
    Attribute(
        "color",
        "person",
        "str",
        "favorite color",
        ("color", "favorite_color", "favourite_colour"),
        (
            "{n} likes the color {v}.",
            "{n} always wears {v}.",
            "{n} painted the door {v}.",
            "{n} prefers {v} to all other colors.",
            "The color {n} loves is {v}.",
            "{n} buys everything in {v}.",
        ),
        (
            "Which color does {n} like?",
            "What color does {n} prefer?",
            "Which color is {n}'s favorite?",
            "What color does {n} love?",
        ),
        pool=_COLOURS,
    ),
    Attribute(
        "pet",
        "person",
        "str",
        "pet",
        ("pet", "animal", "pet_kind"),
        (
            "{n} owns a {v}.",
            "{n} keeps a {v} at home.",
            "{n} has a {v}.",
            "{n} walks a {v} every morning.",
            "{n} adopted a {v}.",
            "{n} feeds a {v} twice a day.",
            "{n} takes care of a {v}.",
        ),
        (
            "Which pet does {n} own?",
            "What pet does {n} have?",
            "Which animal does {n} keep?",
            "What animal does {n} have?",
            "Which animal lives with {n}?",
        ),
        pool=_PETS,
    ),
    Attribute(
        "friend",
        "person",
        "str",
        "best friend",
        ("friend", "best_friend", "friend_name"),
        (
            "{n} is a friend of {v}.",
            "{n} spends the weekends with {v}.",
            "{n} and {v} are best friends.",
            "{n} trusts {v} most of all.",
            "{n} calls {v} a true friend.",
            "{n} shares all secrets with {v}.",
        ),
        ("Who is the friend of {n}?", "Who is {n}'s friend?", "Which friend does {n} have?", "Whose friend is {n}?"),
        make=_other_person,
    ),
    Attribute(
        "fruit",
        "person",
        "str",
        "crop",
        ("crop", "produce", "goods", "fruit"),
        (
            "{n} sells {v} at the market.",
            "{n} grows {v}.",
            "{n} deals in {v}.",
            "{n} harvests {v} in the autumn.",
            "{n} has a field of {v}.",
            "{n} delivers {v} to the shops.",
            "The stall of {n} offers {v}.",
        ),
        (
            "What does {n} sell?",
            "What does {n} grow?",
            "Which goods does {n} deal in?",
            "What does {n} harvest?",
            "What can one buy from {n}?",
        ),
        pool=_FRUITS,
    ),
    Attribute(
        "year",
        "person",
        "int",
        "year of joining",
        ("year", "hired_year", "joined_in", "start_year", "year_joined"),
        (
            "{n} was hired in {v}.",
            "{n} joined the guild in {v}.",
            "{n} has been a member since {v}.",
            "{n} started here in {v}.",
            "In {v}, {n} joined the team.",
            "{n} became a member in {v}.",
        ),
        (
            "When did {n} join?",
            "In which year was {n} hired?",
            "Since which year has {n} been a member?",
            "In what year did {n} start?",
            "When was {n} hired?",
        ),
        make=_int(1900, 2029),
    ),
    Attribute(
        "instrument",
        "person",
        "str",
        "instrument",
        ("instrument", "plays"),
        (
            "{n} plays the {v}.",
            "{n} practises the {v} every evening.",
            "{n} is learning the {v}.",
            "{n} bought a new {v}, the instrument of dreams.",
            "{n} performs on the {v}.",
            "{n} teaches the {v}.",
        ),
        (
            "Which instrument does {n} play?",
            "What instrument does {n} play?",
            "What does {n} play?",
            "Which instrument is {n} good at?",
        ),
        pool=_INSTRUMENTS,
    ),
    Attribute(
        "drink",
        "person",
        "str",
        "favorite drink",
        ("drink", "favorite_drink", "beverage"),
        (
            "{n} drinks {v} every morning.",
            "{n} always orders {v}.",
            "{n} never says no to a cup of {v}.",
            "{n} likes to drink {v}.",
            "{n} serves {v} to all guests.",
            "{n} is fond of {v}.",
        ),
        ("What does {n} drink?", "Which drink does {n} like?", "What does {n} like to drink?"),
        pool=_DRINKS,
    ),
    Attribute(
        "hobby",
        "person",
        "str",
        "hobby",
        ("hobby", "pastime", "leisure_activity"),
        (
            "{n} enjoys {v}.",
            "{n} spends free time on {v}.",
            "{n} is passionate about {v}.",
            "{n} took up {v}.",
            "{n} relaxes with {v}.",
            "On Sundays {n} goes in for {v}.",
        ),
        (
            "What does {n} enjoy?",
            "What does {n} do in the free time?",
            "Which hobby does {n} have?",
            "How does {n} spend the free time?",
        ),
        pool=_HOBBIES,
    ),
    Attribute(
        "height",
        "person",
        "int",
        "height",
        ("height", "height_cm"),
        ("{n} is {v} cm tall.", "{n} measures {v} cm.", "{n} stands {v} cm high.", "{n} has grown to {v} cm."),
        ("How tall is {n}?", "How many cm does {n} measure?", "How many cm tall is {n}?"),
        make=_int(120, 210),
    ),
    Attribute(
        "children",
        "person",
        "int",
        "number of children",
        ("children", "num_children", "number_of_children"),
        (
            "{n} has {v} children.",
            "{n} raised {v} children.",
            "{n} is the parent of {v} children.",
            "{n} and the {v} children live together.",
        ),
        ("How many children does {n} have?", "How many kids does {n} have?", "How many children did {n} raise?"),
        make=_int(2, 9),
    ),
    Attribute(
        "badge",
        "person",
        "str",
        "badge code",
        ("badge", "badge_code", "code", "employee_id"),
        (
            "{n} carries badge {v}.",
            "{n} signs in with the code {v}.",
            "{n} has the badge number {v}.",
            "Badge {v} belongs to {n}.",
        ),
        ("Which badge does {n} carry?", "What is the code of {n}?", "What badge number does {n} have?"),
        make=Names.code,
    ),
    Attribute(
        "subject",
        "person",
        "str",
        "field of study",
        ("subject", "field_of_study", "field", "major"),
        (
            "{n} studies {v}.",
            "{n} reads books about {v}.",
            "{n} holds a degree in {v}.",
            "{n} lectures on {v}.",
            "{n} wrote a thesis in {v}.",
        ),
        ("What does {n} study?", "Which subject does {n} study?", "In which field did {n} study?"),
        pool=_SUBJECTS,
    ),
    Attribute(
        "mood",
        "person",
        "str",
        "mood",
        ("mood", "feeling", "emotion", "sentiment"),
        ("{n} feels {v} today.", "{n} is {v} today.", "{n} looks {v}.", "{n} seems to be {v}."),
        ("How does {n} feel?", "How does {n} feel today?", "Which mood is {n} in?"),
        pool=_MOODS,
    ),
    Attribute(
        "level",
        "person",
        "str",
        "skill level",
        ("level", "skill_level", "experience_level"),
        ("{n} trains at the {v} level.", "{n} was placed in the {v} class.", "{n} reached the {v} level."),
        ("At which level does {n} train?", "Which level has {n} reached?", "What level is {n} at?"),
        pool=_LEVELS,
    ),
    Attribute(
        "languages",
        "person",
        "list",
        "languages",
        ("languages", "spoken_languages", "languages_spoken"),
        ("{n} speaks {v}.", "{n} is fluent in {v}.", "{n} can read {v}.", "{n} learned {v} at school."),
        ("Which languages does {n} speak?", "What languages does {n} speak?", "In which languages is {n} fluent?"),
        pool=_LANGUAGES,
    ),
    Attribute(
        "siblings",
        "person",
        "list",
        "siblings",
        ("siblings", "brothers_and_sisters", "family_members"),
        ("{n} grew up with {v}.", "The siblings of {n} are called {v}.", "{n} has the siblings {v}."),
        ("Who are the siblings of {n}?", "Which siblings does {n} have?", "With whom did {n} grow up?"),
        make=lambda names: [names.invented() for _ in range(names.rng.choice((2, 2, 3)))],
    ),
    Attribute(
        "married",
        "person",
        "bool",
        "married",
        ("married", "is_married"),
        ("{n} is married.", "{n} has a wedding ring and a spouse.", "{n} got married."),
        ("Is {n} married?", "Does {n} have a spouse?"),
        deny=("{n} is not married.", "{n} is single.", "{n} never married."),
    ),
    Attribute(
        "swims",
        "person",
        "bool",
        "able to swim",
        ("can_swim", "swimmer", "able_to_swim"),
        ("{n} can swim.", "{n} swims like a fish.", "{n} knows how to swim."),
        ("Can {n} swim?", "Is {n} able to swim?"),
        deny=("{n} cannot swim.", "{n} never learned to swim.", "{n} is unable to swim."),
    ),
    Attribute(
        "car",
        "person",
        "bool",
        "car owner",
        ("owns_car", "has_car", "car_owner"),
        ("{n} owns a car.", "{n} drives a car to work.", "{n} parks a car outside."),
        ("Does {n} own a car?", "Is {n} a car owner?"),
        deny=("{n} does not own a car.", "{n} has no car.", "{n} sold the car."),
    ),
    Attribute(
        "meat",
        "person",
        "bool",
        "vegetarian",
        ("vegetarian", "is_vegetarian"),
        ("{n} is a vegetarian.", "{n} eats no meat.", "{n} gave up meat."),
        ("Is {n} a vegetarian?", "Is {n} vegetarian?"),
        deny=("{n} eats meat.", "{n} is not a vegetarian.", "{n} loves a steak."),
    ),
    Attribute(
        "population",
        "place",
        "int",
        "population",
        ("population", "inhabitants", "num_inhabitants"),
        (
            "{n} has {v} inhabitants.",
            "{v} people live in {n}.",
            "{n} is home to {v} people.",
            "{n} counts {v} citizens.",
        ),
        ("How many people live in {n}?", "How many inhabitants does {n} have?", "How many citizens does {n} count?"),
        make=lambda names: (
            names.rng.randint(1, 99) * 10 ** names.rng.choice((2, 3, 4))
            if names.rng.random() < 0.5
            else names.rng.randint(200, 99999)
        ),
    ),
    Attribute(
        "river",
        "place",
        "str",
        "river",
        ("river", "river_name"),
        (
            "{n} lies on the river {v}.",
            "The river {v} flows through {n}.",
            "{n} was built along the {v}.",
            "Boats reach {n} on the {v}.",
        ),
        ("On which river does {n} lie?", "Which river flows through {n}?", "Which river runs past {n}?"),
        make=Names.invented,
    ),
    Attribute(
        "mayor",
        "place",
        "str",
        "mayor",
        ("mayor", "mayor_name", "head_of_town"),
        (
            "{n} is governed by mayor {v}.",
            "{v} is the mayor of {n}.",
            "{n} elected {v} as mayor.",
            "Mayor {v} runs {n}.",
        ),
        ("Who is the mayor of {n}?", "Who governs {n}?", "Who runs {n}?", "Who was elected mayor of {n}?"),
        make=_other_person,
    ),
    Attribute(
        "founded",
        "place",
        "int",
        "founding year",
        ("founded", "founding_year", "year_founded", "established"),
        (
            "{n} was founded in {v}.",
            "{n} goes back to {v}.",
            "{n} has existed since {v}.",
            "The first stone of {n} was laid in {v}.",
        ),
        ("When was {n} founded?", "In which year was {n} founded?", "Since when has {n} existed?"),
        make=_int(1000, 2010),
    ),
    Attribute(
        "product",
        "place",
        "str",
        "main product",
        ("product", "main_product", "export"),
        (
            "{n} is famous for its {v}.",
            "{n} exports {v}.",
            "{n} lives on the trade in {v}.",
            "Everybody in {n} makes {v}.",
        ),
        ("What is {n} famous for?", "What does {n} export?", "Which product comes from {n}?", "What is made in {n}?"),
        pool=_PRODUCTS,
    ),
    Attribute(
        "climate",
        "place",
        "str",
        "climate",
        ("climate", "weather", "conditions"),
        ("The weather in {n} is {v}.", "{n} is known for {v} weather.", "It is usually {v} in {n}."),
        ("How is the weather in {n}?", "What is the weather like in {n}?", "What is the weather in {n}?"),
        pool=_CLIMATES,
    ),
    Attribute(
        "landmark",
        "place",
        "str",
        "landmark",
        ("landmark", "sight", "attraction"),
        (
            "Visitors of {n} come to see the {v}.",
            "{n} is proud of its {v}.",
            "The best sight in {n} is the {v}.",
            "{n} has a large {v}.",
        ),
        ("What do visitors of {n} come to see?", "Which sight does {n} have?", "What is {n} proud of?"),
        pool=_LANDMARKS,
    ),
    Attribute(
        "airport",
        "place",
        "bool",
        "has an airport",
        ("has_airport", "airport"),
        ("{n} has an airport.", "Planes land in {n}.", "There is an airport in {n}."),
        ("Does {n} have an airport?", "Is there an airport in {n}?"),
        deny=("{n} has no airport.", "There is no airport in {n}.", "Planes do not land in {n}."),
    ),
    Attribute(
        "founder",
        "company",
        "str",
        "founder",
        ("founder", "founded_by", "founder_name"),
        ("{n} was started by {v}.", "{v} is the founder of {n}.", "{v} set up {n}.", "{n} was founded by {v}."),
        ("Who founded {n}?", "Who started {n}?", "Who set up {n}?", "Who is the founder of {n}?"),
        make=_other_person,
    ),
    Attribute(
        "office",
        "company",
        "str",
        "head office",
        ("head_office", "headquarters", "office", "based_in"),
        (
            "{n} has its head office in {v}.",
            "{n} is based in {v}.",
            "The headquarters of {n} are in {v}.",
            "{n} operates from {v}.",
        ),
        (
            "Where is {n} based?",
            "Where is the head office of {n}?",
            "In which city is {n} based?",
            "Where are the headquarters of {n}?",
        ),
        make=Names.place,
    ),
    Attribute(
        "employees",
        "company",
        "int",
        "number of employees",
        ("employees", "num_employees", "staff", "headcount"),
        ("{n} employs {v} people.", "{n} has {v} employees.", "{v} people work for {n}.", "{n} has a staff of {v}."),
        ("How many people work for {n}?", "How many employees does {n} have?", "How many people does {n} employ?"),
        make=_int(3, 9800),
    ),
    Attribute(
        "sector",
        "company",
        "str",
        "sector",
        ("sector", "industry", "business", "category"),
        ("{n} is active in {v}.", "{n} makes its money in {v}.", "{n} belongs to the {v} sector."),
        ("In which sector is {n} active?", "In which industry is {n}?", "Which sector does {n} belong to?"),
        pool=_SECTORS,
    ),
    Attribute(
        "makes",
        "company",
        "str",
        "product line",
        ("product_line", "makes", "product"),
        ("{n} produces {v}.", "{n} is a maker of {v}.", "{n} ships {v} all over the world."),
        ("What does {n} produce?", "What does {n} make?", "Which goods does {n} ship?"),
        pool=_PRODUCTS,
    ),
    Attribute(
        "listed",
        "company",
        "bool",
        "publicly listed",
        ("publicly_listed", "is_public", "listed"),
        ("{n} is publicly listed.", "The shares of {n} are traded on the stock exchange.", "{n} is a public company."),
        ("Is {n} publicly listed?", "Is {n} a public company?"),
        deny=("{n} is privately held.", "{n} is not publicly listed.", "{n} is a private company."),
    ),
)
BY_KEY = {attribute.key: attribute for attribute in ATTRIBUTES}
BY_KIND: dict[Kind, tuple[Attribute, ...]] = {
    kind: tuple(a for a in ATTRIBUTES if a.kind == kind) for kind in ("person", "place", "company")
}
