"""The words that the corpus is built from, and random names, words and strings."""

from __future__ import annotations

import re
import string
from random import Random


def words(text: str, gap: str | None = None) -> list[str]:
    """Split a table in the source: at blanks, or at ``gap`` over several lines."""
    return text.split() if gap is None else text.replace("\n", "").split(gap)


NOUNS = words("""apple river stone window garden bridge candle mountain forest table
letter basket winter summer morning evening doctor teacher farmer baker sailor
pencil paper bottle pocket shadow island village castle market kitchen ladder
blanket feather button engine rocket planet ocean valley desert meadow orchard
cottage lantern mirror hammer saddle barrel anchor violin trumpet piano drum
sandwich pepper carrot onion tomato lemon cherry banana potato pumpkin honey
butter cheese bread soup cake coffee tea water milk sugar salt rice horse
tiger rabbit turtle monkey parrot spider beetle dragon wizard knight queen
king prince brother sister mother father friend neighbor stranger city street
tower temple school library museum station airport harbor hotel office store
server client token model cache stream buffer thread network socket parser
keyboard screen printer camera battery cable button switch folder file record
story poem song picture number letter word question answer reason secret
promise dream memory journey adventure treasure""")
ADJECTIVES = words("""red blue green yellow white black golden silver purple orange
small big tiny huge old new young tall short long wide narrow deep quiet loud
bright dark warm cold soft hard gentle brave clever kind proud lonely happy
sad angry calm busy lazy quick slow heavy light empty full round sharp smooth
rough sweet bitter salty fresh strange simple curious careful friendly honest
patient wild wise early late local remote random fast""")
VERBS = words("""runs walks sings jumps sleeps waits reads writes laughs dances
listens looks turns stops works plays rests swims climbs falls grows shines
travels wonders whispers smiles hides returns begins""")
OTHER = words("""and or but if then because while after before under over near
between without with for from into today tomorrow yesterday always never often
again here there please maybe yes no ok hello goodbye thanks sorry welcome
test one two three four five ten hundred first last next north south east west
up down left right alpha beta gamma delta echo tango foxtrot zulu""")
ANIMALS = words("""cat dog fox owl bear wolf mouse frog duck goat sheep deer hare
otter badger heron swan crow hedgehog squirrel horse rabbit turtle""")
COLORS = words("red blue green yellow white black orange purple pink brown gray")
NAMES = words("""Ada Bob Alice Carol Dave Eve Frank Grace Henry Ivy Jack Kate Leo Mia
Noah Olivia Paul Quinn Rose Sam Tina Uma Victor Wendy Xavier Yara Zoe Anna Ben
Clara Daniel Emma Felix George Hannah Igor Julia Karl Laura Max Nina Oscar
Peter Ruth Sofia Tom Ursula Vera Walter Lena Maria John Mary James Linda
Robert Susan David Sarah Michael Lisa Thomas Nancy Chris Betty Mark Sandra
Steven Ashley Kevin Emily Brian Donna Edward Carlos Pablo Lucia Diego Elena
Ahmed Fatima Omar Layla Yuki Hiro Mei Wei Ravi Priya Arjun Anya Ivan Olga
Dmitri Sven Ingrid Lars Astrid Pierre Marie Claude Jean Hans Greta""")
SURNAMES = words("""Smith Jones Brown Miller Davis Wilson Taylor Clark Lewis Walker
Hall Young King Wright Hill Green Baker Adams Nelson Carter Lovelace Turing
Hopper Stone Rivers Wood Fisher Cook Lang Berg Weber Rossi Silva Novak""")
CITIES = words("""London Paris Berlin Madrid Rome Vienna Oslo Tokyo Boston Chicago
Sydney Toronto Lima Cairo Dublin Lisbon Prague Athens Warsaw Seoul Munich
Seattle Denver Austin Miami Hamburg Lyon Porto Kyoto Mumbai Delhi Nairobi
Zurich Geneva Helsinki""")
HOBBIES = words("""chess painting cooking reading music football tennis swimming
hiking gardening dancing fishing running cycling drawing singing knitting
photography programming astronomy""")
FOODS = words("""pizza pasta sushi soup salad bread cheese rice noodles pancakes
apples bananas cherries chocolate cake curry tacos potatoes carrots""")
EMOJI = list(
    "😀😃😄😁😂😊😍😎🤔😴😭😡👍👎👏🙏🎉🎂🎁🚀🌍🌙🌞🔥💧🌈🍎🍌🍕🍰🐱🐶🦊"
    "🐻🐼🐸🦁🐢🐙🦄🌹🌲🌵🏠🚗🚲✈⚽🎵📚💡🔑❤💙⭐✅❌✨"
)
FOREIGN = words("""café naïve jalapeño über straße größe señor mañana garçon crème
façade piñata smörgåsbord ångström żółw łódź čeština dvořák şehir
привет мир спасибо дом книга вода γειά κόσμος νερό 你好 世界 谢谢 水 火 山
こんにちは ありがとう 世界 猫 犬 안녕 세계 물 नमस्ते दुनिया שלום עולם مرحبا
عالم œuvre Ærø Øster Málaga São Zürich Kraków Île Ñandú""")
CODE = words(
    r"""print("hello") x=1 foo(bar) a+b==c [1,2,3] {"a":1} #!/bin/sh i++
if(x>0){return;} f(x): <b>bold</b> &amp; https://example.com/a?b=c
/usr/local/bin user@example.com --verbose *.txt $HOME @decorator lambda:0
SELECT*FROM;{}[]() != <= >= && || // /* */ `code` ~/notes 100% C++ #42
v1.2.3 a_b_c snake_case camelCase kebab-case 0x1F 3.14 1e-5 $9.99 (a) [b]
{c} <d> "quoted" 'single' a/b a\b x^2 50/50 #tag @name"""
)
COMMON = words(
    """hello|hi|hey|hello world|Hello, world!|this is a test|This is a test.|test|testing
|ok|OK|yes|no|ping|pong|good morning|good night|thank you|I love you|hello there
|hi there|I am fine|cheese|banana|one two three
|the quick brown fox jumps over the lazy dog|happy birthday|please|goodbye
|welcome back|abc|foo|bar|foo bar|hello hello|How are you?|I am a robot|nothing|done""",
    "|",
)
CONSONANTS = "bcdfghjklmnprstvwz"
SYLLABLE_ENDS = ["", "", "", "n", "r", "l", "s", "m", "k", "t", "x"]


def pseudo_word(rng: Random, low: int = 2, high: int = 4) -> str:
    """Return a word that does not exist, such as ``varokin``."""
    parts = [
        rng.choice(CONSONANTS) + rng.choice("aeiouy") + rng.choice(SYLLABLE_ENDS)
        for _ in range(rng.randint(low, high))
    ]
    return "".join(parts)


def letters(rng: Random, low: int = 3, high: int = 10) -> str:
    """Return random letters and digits, as in a password or an identifier."""
    alphabet = rng.choice(
        [
            string.ascii_lowercase,
            string.ascii_uppercase,
            string.ascii_letters,
            string.ascii_letters + string.digits,
            "0123456789abcdef",
            string.ascii_uppercase + string.digits + "-",
        ]
    )
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(low, high)))


def word(rng: Random) -> str:
    """Return a common English word."""
    return rng.choice(rng.choice((NOUNS, NOUNS, ADJECTIVES, VERBS, OTHER)))


def first_name(rng: Random) -> str:
    """Return a first name; one in three does not exist."""
    return rng.choice(NAMES) if rng.random() < 0.65 else pseudo_word(rng, 2, 3).capitalize()


def full_name(rng: Random) -> str:
    """Return a first name, sometimes with a surname."""
    name = first_name(rng)
    if rng.random() < 0.3:
        name += " " + (
            rng.choice(SURNAMES) if rng.random() < 0.7 else pseudo_word(rng).capitalize()
        )
    return name


def city(rng: Random) -> str:
    """Return a city; one in three does not exist."""
    return rng.choice(CITIES) if rng.random() < 0.65 else pseudo_word(rng, 2, 3).capitalize()


def number(rng: Random) -> int:
    """Return a whole number, mostly a short one."""
    return rng.randint(0, 10 ** rng.choice((1, 2, 2, 3, 4, 6)) - 1)


def numeral(rng: Random) -> str:
    """Return a number as text: whole, with decimals, a date or a time."""
    match rng.randint(0, 5):
        case 0:
            return f"{number(rng)}.{rng.randint(0, 99)}"
        case 1:
            return f"{rng.randint(1900, 2099)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
        case 2:
            return f"{rng.randint(0, 23)}:{rng.randint(0, 59):02}"
        case _:
            return str(number(rng))


def sentence(rng: Random) -> str:
    """Return a short plain sentence."""
    adjective, noun, other = rng.choice(ADJECTIVES), rng.choice(NOUNS), rng.choice(NOUNS)
    name, verb = first_name(rng), rng.choice(VERBS)
    forms = (
        f"The {adjective} {noun} {verb} near the {other}.",
        f"{name} {verb} in {city(rng)}.",
        f"The {noun} of {name} is {adjective}.",
        f"{name} bought {rng.randint(2, 99)} {adjective} {noun}s.",
        f"A {noun} and a {other} are in the {rng.choice(NOUNS)}.",
        f"I saw a {adjective} {noun} today!",
        f"Where is the {adjective} {noun}?",
        f"My {noun} has number {number(rng)}.",
        f"{name} likes {rng.choice(FOODS)} and {rng.choice(HOBBIES)}.",
    )
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", rng.choice(forms))


def token_like(rng: Random) -> str:
    """Return something that cannot be guessed: pseudo-word, letters, number, emoji, code."""
    roll = rng.random()
    if roll < 0.35:
        return pseudo_word(rng)
    if roll < 0.55:
        return letters(rng)
    if roll < 0.75:
        return numeral(rng)
    if roll < 0.85:
        return rng.choice(EMOJI)
    if roll < 0.93:
        return rng.choice(FOREIGN)
    return rng.choice(CODE)


def phrase(rng: Random) -> str:
    """Return text to copy: words, a sentence, or things that cannot be guessed."""
    roll = rng.random()
    if roll < 0.05:
        text = rng.choice(COMMON)
    elif roll < 0.34:
        text = " ".join(word(rng) for _ in range(rng.choice((1, 1, 2, 2, 3, 4, 5, 7))))
    elif roll < 0.5:
        text = " ".join(sentence(rng) for _ in range(rng.choice((1, 1, 1, 2))))
    elif roll < 0.6:
        text = full_name(rng)
    elif roll < 0.8:
        text = " ".join(token_like(rng) for _ in range(rng.choice((1, 1, 2, 3, 4))))
    else:
        mixed = (token_like, word, word)
        text = " ".join(rng.choice(mixed)(rng) for _ in range(rng.choice((2, 3, 4, 6))))
    style = rng.random()
    if style < 0.12:
        text = text.capitalize() + rng.choice(("", ".", "!", "?"))
    elif style < 0.16:
        text = text.upper()
    elif style < 0.2:
        text = text.title()
    elif style < 0.25:
        text = text.replace(" ", ", ")
    return text
