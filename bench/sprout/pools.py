"""The closed classes of the micro-world: values that an attribute can have."""

from __future__ import annotations

from bench.sprout.names import words

JOBS = words(
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
COLOURS = words(
    "red blue green black white yellow purple orange brown grey pink teal silver gold violet crimson turquoise beige"
)
PETS = words(
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
FRUITS = words(
    "apples pears plums grapes lemons figs cherries melons dates peaches apricots bananas beans berries cabbages "
    "carrots chestnuts cucumbers garlic hazelnuts kiwis leeks lentils limes mangoes mushrooms olives onions oranges "
    "papayas peas peppers potatoes pumpkins radishes raisins spinach tomatoes turnips walnuts"
)
INSTRUMENTS = words(
    "accordion banjo bassoon cello clarinet drums flute guitar harmonica harp horn lute mandolin oboe organ piano "
    "saxophone sitar trombone trumpet tuba ukulele viola violin xylophone"
)
DRINKS = words(
    "ale beer chai cider cocoa coffee cola espresso juice lemonade mead milk rum tea tonic water whisky wine"
) + (
    "green tea",
    "black coffee",
    "orange juice",
    "red wine",
    "hot chocolate",
    "mineral water",
)
HOBBIES = words(
    "archery boxing chess climbing cooking cycling dancing drawing fencing fishing gardening golf hiking juggling "
    "knitting painting photography pottery reading rowing running sailing singing skating skiing surfing swimming "
    "tennis weaving yoga"
)
LANGUAGES = words(
    "Arabic Basque Bengali Chinese Czech Danish Dutch English Finnish French German Greek Hebrew Hindi Hungarian "
    "Irish Italian Japanese Korean Latin Norwegian Persian Polish Portuguese Russian Spanish Swedish Turkish Urdu "
    "Welsh"
)
SUBJECTS = words(
    "algebra art biology chemistry drama economics geography geometry grammar history law logic music physics"
)
MOODS = words("happy sad angry calm bored proud nervous curious tired cheerful")
LEVELS = words("beginner intermediate advanced expert")
PRODUCTS = words(
    "amber barrels bells boats books bread bricks candles carpets cement cheese clocks cloth coal copper glass gloves "
    "hats honey iron jam lace lamps leather linen mirrors paper pearls porcelain ropes salt shoes silk soap steel "
    "sugar swords tiles tin tobacco toys wool"
)
CLIMATES = words("mild dry humid cold hot windy rainy snowy foggy sunny")
LANDMARKS = words(
    "abbey aqueduct bridge castle cathedral observatory zoo fountain garden harbour library lighthouse mill museum "
    "opera palace park statue temple theatre university"
) + ("clock tower",)
SECTORS = words("banking farming shipping mining software energy fashion tourism insurance transport medicine media")
