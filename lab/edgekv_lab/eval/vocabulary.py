"""Words to count, to remember and to name things by: everyday nouns, and adjectives that go with
any of them.
"""

from __future__ import annotations

from random import Random

NOUNS = """
acorn alley almond amulet ankle apron arrow aspen attic awning axle bacon badge bagel ballad bamboo
banner barley basin bassoon bayou beacon beaker beetle bellow bishop bison blanket blizzard blossom
bobbin bonnet boulder bracket bramble brook bucket buckle bugle bunker burrow butter button cabin
cactus camera canal candle canoe canyon carpet castle cavern cedar cellar cement cherry chimney
cider cinder circus clover cobweb coffee collar comet copper coral cotton cradle crayon cricket
crystal curtain cushion daisy dagger desert diary domino donkey dragon drawer drizzle eagle easel
elbow ember engine fabric feather fiddle filter flannel flute forest fossil fountain freckle funnel
galaxy garlic garnet geyser ginger glacier goblet gravel grotto guitar hammock hamster harness
harvester hatchet hazel helmet hinge honey hornet icicle igloo insect island jacket jasmine jigsaw
journal jungle kennel kernel kettle kitten ladder lagoon lantern lattice lavender lemon lettuce
lichen lobster locket lumber magnet mallet mango mantle maple marble marsh meadow melon mitten
monsoon mortar mosaic mosquito muffin mustard napkin needle nettle nickel nutmeg oasis oatmeal
ocean olive onion orbit orchid otter oven oyster paddle pancake parcel parrot pasture pebble
pelican pencil pepper pewter piano pickle pigeon pillow pistachio plaster platter plough pocket
poppy portrait potato prairie pretzel prism pulley pumpkin puppet quartz quill rabbit radish raft
raisin raspberry rattle ribbon rivet robin rudder saffron salmon sandal satchel sausage scarf
scooter shovel shutter skillet sleigh sparrow spinach sponge squirrel stable statue stirrup summit
sweater tablet tapestry teapot thimble thistle thunder timber toffee tomato tractor trellis trolley
trumpet tulip tunnel turnip turret vanilla velvet village vinegar violet waffle walnut wallet
walrus weasel whisker whistle willow window wrench yogurt zebra zipper
""".split()

ADJECTIVES = """
ancient bashful blunt breezy brisk calm chilly clever crisp curly dapper dizzy dusty eager early
fancy fluffy fragile frosty gaudy giddy glossy grand hasty humble jolly keen lavish lively lonely
lucky mellow merry mighty misty modest muddy nimble noble odd polite proud quaint quick rapid rusty
shiny shy silent silky sleepy slender sly smooth snug spicy steep sturdy sunny swift tame tender
thirsty tiny vivid wary wild windy witty
""".split()


def words(rng: Random, n: int) -> list[str]:
    """n different words; when the nouns are used up, an adjective and a noun with a hyphen
    between.
    """
    found = rng.sample(NOUNS, min(n, len(NOUNS)))
    return found + pairs(rng, n - len(found))


def pairs(rng: Random, n: int) -> list[str]:
    """n different names such as muddy-acorn."""
    numbers = rng.sample(range(len(ADJECTIVES) * len(NOUNS)), n)
    return [
        f"{ADJECTIVES[number % len(ADJECTIVES)]}-{NOUNS[number // len(ADJECTIVES)]}"
        for number in numbers
    ]
