"""Names and words that the sites' content is made of."""

from __future__ import annotations

PEOPLE = [
    (name.split()[0], name.split()[1])
    for name in (
        "Ada Brook, Ben Carver, Cleo Dunn, Dev Elms, Eva Frost, Finn Gale, Gita Hale, Hugo Irwin, Iris Jones, Jon "
        "Keats, Kira Lund, Leo Marsh, Mia North, Nils Oakes, Olga Price, Pia Quill, Ravi Stone, Sara Thorn, Tom Usher, "
        "Uma Vale, Vera Wells, Will Yates"
    ).split(", ")
]
USERS = [f"{a.lower()}_{b.lower()}" for a, b in PEOPLE]
COLOURS = ["amber", "black", "blue", "green", "grey", "ivory", "red", "teal", "white", "yellow"]
GOODS = {
    "kitchen": [
        "kettle",
        "teapot",
        "frying pan",
        "bread knife",
        "mixing bowl",
        "coffee mill",
        "apron",
        "cutting board",
    ],
    "garden": ["watering can", "spade", "hose", "lantern", "bird feeder", "plant pot", "rake", "pruning shears"],
    "office": ["desk lamp", "stapler", "notebook", "pen set", "filing box", "desk chair", "calendar", "paper tray"],
    "sports": [
        "yoga mat",
        "skipping rope",
        "water bottle",
        "tennis ball",
        "running belt",
        "headband",
        "dumbbell",
        "football",
    ],
    "toys": ["puzzle", "kite", "wooden train", "dice set", "yo-yo", "drum", "building blocks", "marble run"],
}
MAKERS = ["Alder", "Birch", "Cedar", "Dune", "Ember", "Fjord"]
TOPICS = {
    "books": [
        "a novel for a long train ride",
        "short stories by the sea",
        "the best atlas ever",
        "reading aloud to children",
    ],
    "cooking": ["soup without salt", "bread that never rises", "what to do with ten lemons", "a pan for life"],
    "cycling": ["a bell that works in rain", "night rides by the river", "how to patch a tube", "lights for winter"],
    "gardens": ["tomatoes on a balcony", "moss between the stones", "a hedge for birds", "frost in late May"],
    "music": [
        "learning the cello at fifty",
        "songs with only two chords",
        "quiet records for work",
        "tuning an old piano",
    ],
    "travel": [
        "a week on small islands",
        "night trains worth the price",
        "walking from hut to hut",
        "packing for two climates",
    ],
}
CITIES = ["Aldport", "Brenwick", "Carlow Bay", "Dunmere", "Eastvale", "Fernhill"]
STREETS = (
    "Abbey Road, Bridge Street, Castle Lane, Dock Street, Elm Avenue, Field Way, Green Walk, High Street, Ivy Close, "
    "Kiln Lane"
).split(", ")
KINDS = {
    "museum": ["City Museum", "Museum of Clocks", "Maritime Museum", "Glass Museum"],
    "library": ["Central Library", "Reading Room", "Old Library", "Children's Library"],
    "cafe": ["Blue Door Cafe", "Corner Cafe", "Lemon Tree Cafe", "Station Cafe"],
    "hotel": ["Grand Hotel", "Harbour Hotel", "Park Hotel", "Swan Hotel"],
    "pharmacy": ["Green Cross Pharmacy", "Market Pharmacy", "Night Pharmacy", "Town Pharmacy"],
    "park": ["Botanic Park", "Hill Park", "Lake Park", "Mill Park"],
}
TOOLS = ["atlas", "beacon", "compass", "delta", "echo", "flint", "grove", "harvest", "inkwell", "juniper"]
BUGS = [
    "Crash when the list is empty",
    "Dark colours are hard to read",
    "Export forgets the last row",
    "Login page shows twice",
    "Search ignores accents",
    "Slow start on old machines",
    "Time zone is off by one hour",
    "Typo in the welcome text",
    "Undo does not work after paste",
    "Update the manual",
    "Wrong total in the summary",
    "Icons are missing on small screens",
]
