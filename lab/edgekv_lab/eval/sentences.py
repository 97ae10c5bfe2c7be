"""Haystack text: an endless, varied, deterministic stream of plain English sentences from a small
grammar.

Every sentence is a template whose slots are drawn from word lists; a paragraph holds on to one
person, one place and one thing, so that it reads as being about something. There are no digits in
it: the only number in a haystack is the needle's. It is text to be read past, not a corpus: nothing
in it is true, quoted or meant to be learnt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from random import Random

WORDS: dict[str, list[str]] = {
    slot: [" ".join(word.split()) for word in words.split(",")]
    for slot, words in {
        "name": (
            """Agnes, Bertil, Carmela, Dmitri, Esther, Farid, Greta, Hamish, Ines, Joon, Katya,
            Lorenzo, Mirela, Nadim, Olwen, Pascal, Quentin, Rosalind, Sefa, Tobias, Ursula,
            Viktor, Wanda, Xenia, Yusuf, Zelda, Anselm, Brigid, Cosmo, Delphine"""
        ),
        "role": (
            """baker, surveyor, ferry pilot, beekeeper, piano tuner, librarian, glazier, night
            porter, botanist, cartographer, stonemason, retired judge, bus driver, seamstress,
            vet, clockmaker, fisherman, translator, gardener, schoolteacher, locksmith, dairy
            farmer, radio engineer, nurse, carpenter, painter, tram conductor, chemist, cook,
            archivist"""
        ),
        "place": (
            """the old mill, the harbour, the covered market, the railway yard, the upper valley,
            the town hall, the salt marsh, the observatory, the tannery, the botanical garden, the
            lighthouse, the quarry, the village school, the ferry landing, the south bridge, the
            brewery, the weather station, the parish church, the reading room, the orchard, the
            boathouse, the print shop, the fish hall, the pine forest, the drained lake, the
            border post, the theatre cellar, the dye works"""
        ),
        "thing": (
            """a brass telescope, a crate of lemons, a torn map, a bicycle, an accordion, a letter
            without a stamp, a copper kettle, a ladder, a basket of eels, a velvet coat, a wooden
            flute, a jar of honey, a broken clock, a roll of canvas, a lantern, a box of seeds, a
            fishing net, a chess set, a sewing machine, a sack of flour, a painted door, a bundle
            of reeds, a glass float, a saddle, a loaf of rye bread, a barometer, an iron gate, a
            stuffed owl, a violin case, a garden bench"""
        ),
        "adj": (
            """quiet, narrow, uneven, bright, stubborn, patient, crooked, heavy, pale, hollow,
            cheerful, damp, careful, distant, worn, gentle, sudden, plain, restless, faded,
            generous, brittle, familiar, solemn, clumsy, tidy, sour, mild, rough"""
        ),
        "noun": (
            """argument, custom, habit, rumour, harvest, storm, wedding, repair, concert, journey,
            promise, lesson, debt, accident, recipe, election, strike, flood, rehearsal, auction,
            picnic, trial, visit, quarrel, invention, festival, drought, wager"""
        ),
        "many": (
            """crows, tourists, apprentices, geese, neighbours, barrels, children, tools, windows,
            letters, goats, umbrellas, bricks, candles, bells, sailors, tiles, ropes, mushrooms,
            cousins, chairs, wagons, moths, puddles, stories, boots, blankets"""
        ),
        "matter": (
            """the price of wool, the new road, the habits of swallows, the taste of the well
            water, the shape of the hills, the cost of glass, the history of the tower, the rules
            of the game, the quality of the ink, the depth of the snow, the age of the oak, the
            noise of the pumps, the colour of the roofs, the weight of the grain, the smell of the
            varnish, the route of the parade"""
        ),
        "when": (
            """before breakfast, late in the autumn, on market days, after the rain, in the first
            warm week, at dusk, during the fair, when the wind turned, towards evening, in the
            middle of the night, on the shortest day, after the last train, at the end of the
            month, while the bells were ringing, when nobody was looking, in a dry summer, at low
            tide"""
        ),
        "did": (
            """repaired, hid, sold, admired, carried, painted, borrowed, measured, dropped,
            polished, described, lost, weighed, found, wrapped, sketched, inspected, inherited,
            returned, lifted, forgot, photographed, cleaned, bought"""
        ),
        "said": (
            """insisted, doubted, believed, explained, remembered, whispered, suspected, admitted,
            wrote, repeated, claimed, feared"""
        ),
        "how": (
            """slowly, without a word, with great care, twice over, in good humour, against all
            advice, for no clear reason, as usual, with borrowed tools, under protest, almost by
            accident, to general surprise, with cold hands, in a hurry"""
        ),
        "why": (
            """the lamp had gone out, the river was rising, nobody had asked, the paint was still
            wet, the key did not fit, supper was late, the road was blocked, it was cheaper that
            way, the dog had started to bark, the light was failing, the glue had not set, the
            mayor was expected, the wood had warped, everyone else had left, the kettle was
            boiling, the ice was too thin"""
        ),
        "link": (
            """Even so,, In the end,, For a while,, As it happened,, By then,, Still,, On the
            whole,, Later,, Meanwhile,, At first,"""
        ),
    }.items()
}
WORDS["link"] = [f"{word}," for word in WORDS["link"] if word]

TEMPLATES = """
{name} the {role} {did} {thing} near {place} {when}.
{link} {who} {did} {thing} {how}, because {why}.
The {noun} at {where} was {adj} and rather {adj}, but the {many} made up for it.
Nobody at {where} talked about {matter} any more, and {who} thought that was a pity.
{when}, {where} filled with {many}, and the {adj} {noun} was soon forgotten.
{who} {said} that {matter} mattered more than any {noun}.
"{matter} again," said {name}, and put {object} down {how}.
There was {thing} on the step, {object} in the hall and not a sound from {place}.
{link} the {many} were counted, the {many} were not, and {why}.
It took {who} most of the week to learn why the {role} had {did} {object}.
If {why}, {name} would say, one should leave {matter} to the {role}.
{name} and {name} walked from {place} to {where} {when}, arguing about {matter}.
Of all the {many} in {where}, only the {adj} ones were of any use to {who}.
{link} a {adj} {noun} is worth a little trouble, or so {who} {said}.
Between {place} and {place} there is nothing but {many} and {adj} fields.
{who} had once {did} {thing} for the {role}, who never mentioned it again.
What {name} liked best about {where} was {matter}, {when} above all.
{when} the {role} came by, {did} {object} and left {how}.
The {many} belonged to {name}, the {many} to the {role}, and {object} to nobody.
{link} it became clear that {why}, and {who} went home {how}.
One {adj} morning {who} stood at the window of {where} and watched the {many}.
Some said the {noun} was the fault of the {role}; others blamed {matter}.
{name} kept {thing} beside {object}, a {adj} sight in so {adj} a room.
Why the {role} {did} {thing} at {place} is another {noun} altogether.
{link} {where} smelled of rope and apples, and {who} did not mind at all.
No {noun} had ever lasted so long, {said} the {role}, not even {when}.
""".strip().splitlines()


def sentences(rng: Random) -> Iterator[str]:
    """Sentences without end. Each paragraph of four to eight keeps one person (who), place (where)
    and thing (object).
    """
    while True:
        topic = {
            "who": rng.choice(WORDS["name"]),
            "where": rng.choice(WORDS["place"]),
            "object": re.sub("^an? ", "the ", rng.choice(WORDS["thing"])),
        }
        for template in rng.sample(TEMPLATES, rng.randint(4, 8)):
            yield _fill(template, topic, rng)


def _fill(template: str, topic: dict[str, str], rng: Random) -> str:
    used: set[str] = set(topic.values())

    def word(match: re.Match[str]) -> str:
        slot = match.group(1)
        if slot in topic:
            return topic[slot]
        choice = rng.choice([candidate for candidate in WORDS[slot] if candidate not in used])
        used.add(choice)
        return choice

    sentence = re.sub(r"\{(\w+)\}", word, template)
    sentence = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", sentence)
    start = 1 if sentence[0] == '"' else 0
    return sentence[:start] + sentence[start].upper() + sentence[start + 1 :]
