"""Questions for the model whose output a head learns from: endless, from a seed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from random import Random

from examples.bundled_model.corpus import documents


def _split(text: str) -> list[str]:
    """Return the parts between bars."""
    return text.split("|")


TOPICS = _split(
    "the water cycle|photosynthesis|gravity|volcanoes|the solar system|black holes|vaccines|bees|"
    "the Roman Empire|ancient Egypt|the French Revolution|the Silk Road|the moon landing|"
    "rainbows|electric cars|solar panels|wind turbines|the internet|search engines|"
    "computer viruses|machine learning|neural networks|databases|operating systems|compilers|"
    "encryption|Python|recursion|sorting algorithms|binary search|hash tables|linked lists|"
    "version control|testing|healthy eating|sleep|exercise|meditation|stress|friendship|teamwork|"
    "leadership|time management|budgeting|saving money|inflation|supply and demand|taxes|"
    "starting a business|job interviews|gardening|composting|baking bread|coffee|tea|chess|"
    "football|swimming|cycling|hiking|camping|poetry|novels|painting|photography|jazz|"
    "classical music|the guitar|the piano|dancing|theatre|dolphins|elephants|penguins|owls|"
    "wolves|coral reefs|rainforests|deserts|glaciers|earthquakes|hurricanes|climate change|"
    "recycling|clean water|the human heart|the brain|the immune system|DNA|atoms|magnets|light|"
    "sound|electricity|energy|time|prime numbers|fractions|geometry|probability|statistics|"
    "averages|maps|languages|writing|reading|libraries|museums|schools|public transport|trains|"
    "airplanes|ships|bridges|robots|space telescopes|Mars|comets|dinosaurs|fossils|oceans"
)
PEOPLE = _split(
    "a young inventor|an old fisherman|two brothers|a lonely robot|a clever fox|a brave girl|"
    "a tired doctor|a lost astronaut|a kind teacher|a curious cat|a retired detective|a baker|"
    "a painter who cannot see colors|a musician|a shy boy|a queen|a gardener|a lighthouse keeper"
)
PLACES = _split(
    "in a small village|by the sea|in a big city|on a distant planet|in a dark forest|on a train|"
    "in a library|on an island|in the mountains|in a school|at a market|in winter|during a storm"
)
TASKS = _split(
    "adds two numbers|reverses a string|counts the words in a text|"
    "checks whether a number is prime|finds the largest number in a list|sorts a list|"
    "removes duplicates from a list|reads a file|computes a factorial|"
    "checks whether a word is a palindrome|counts vowels|merges two dictionaries|"
    "converts Celsius to Fahrenheit|computes the average of a list|prints the Fibonacci numbers"
)
FORMS = _split(
    "What is {topic}?|Explain {topic} in simple terms.|Tell me about {topic}.|"
    "Write a short paragraph about {topic}.|Why is {topic} important?|"
    "List five facts about {topic}.|What are the main benefits of {topic}?|"
    "How would you explain {topic} to a child?|Write a poem about {topic}.|"
    "What should a beginner know about {topic}?|Give me three tips on {topic}.|"
    "Compare {topic} with {other}.|How does {topic} relate to {other}?|"
    "Write a short story about {person} {place}.|"
    "Write a story in which {person} learns about {topic}.|"
    "Describe a day in the life of {person}.|Write a letter from {person} about {topic}.|"
    "Write a dialogue between {person} and {person2} about {topic}.|"
    "What questions could I ask an expert on {topic}?|Summarize the history of {topic}.|"
    "What are common mistakes with {topic}?|Write an email to a friend about {topic}.|"
    "Make a plan to learn about {topic} in four weeks.|What is the future of {topic}?|"
    "Write a Python function that {task}.|How do I write code that {task}?"
)


def general(seed: int) -> Iterator[str]:
    """Yield questions that any chat model may get."""
    rng = Random(seed)
    while True:
        values = {
            "topic": rng.choice(TOPICS),
            "other": rng.choice(TOPICS),
            "person": rng.choice(PEOPLE),
            "person2": rng.choice(PEOPLE),
            "place": rng.choice(PLACES),
            "task": rng.choice(TASKS),
        }
        yield rng.choice(FORMS).format(**values)


def of_corpus(seed: int, *, held_out: bool = False) -> Iterator[str]:
    """Yield first questions of the conversations that the bundled model learned from, or others."""
    for document in documents(seed, held_out=held_out):
        for message in document.messages or ():
            if message["role"] == "user" and isinstance(message["content"], str):
                yield message["content"]
                break


def main() -> None:
    """Print questions that no head has learned from, one a line."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--bundled", action="store_true", help="those for the bundled model")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1_000_000)
    options = parser.parse_args()
    stream = of_corpus(options.seed, held_out=True) if options.bundled else general(options.seed)
    lines = (line for line in stream if "\n" not in line)
    print("\n".join(islice(lines, options.count)))


if __name__ == "__main__":
    main()
