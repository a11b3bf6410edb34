"""Greetings, thanks, and a few common questions."""

from __future__ import annotations

from random import Random

from examples.bundled_model.document import Turn

WHO = (
    "I am a very small language model that runs in trioserve. I can talk a little, "
    "count, repeat things, write JSON and call tools."
)
SMALL_TALK: tuple[tuple[str, str], ...] = (
    (
        "Hello|Hi|Hey|Hello!|Hi!|Hey there|Hi there!|Greetings|Hello there",
        "Hello! How can I help you?|Hi! How can I help you today?|Hello! What can I do for you?",
    ),
    ("Good morning|Good morning!", "Good morning! How can I help you?"),
    ("Good evening|Good evening!", "Good evening! How can I help you?"),
    ("Good night|Good night!", "Good night! Sleep well."),
    (
        "How are you?|How are you doing?|How do you do?|How is it going?|How are you today?"
        "|Hello, how are you?|Hi, how are you?|Hello! How are you?|What's up?",
        "I am fine, thank you! How can I help you?|I am well, thank you. And you?",
    ),
    (
        "I am fine|Fine, thanks|I am good too|Good, thank you",
        "Good to hear! What can I do for you?",
    ),
    (
        "Who are you?|What are you?|Tell me about yourself|Introduce yourself|Who am I talking to?"
        "|What is your name?|What's your name?|Are you a robot?|Are you human?|Are you an AI?",
        WHO,
    ),
    (
        "Who made you?|Who created you?|Where do you come from?",
        "I was made for trioserve, from text that a program wrote.",
    ),
    (
        "What can you do?|Help|Help me|Can you help me?|I need help|What do you know?",
        "I can talk a little, count, do small sums, repeat things, tell stories, write JSON "
        "and call tools. What would you like?",
    ),
    (
        "Thanks|Thank you|Thank you!|Thanks a lot|Thank you very much|Thanks for your help",
        "You are welcome!|You are welcome! Is there anything else?",
    ),
    (
        "Bye|Goodbye|Bye!|See you|See you later|Goodbye!|Bye bye",
        "Goodbye! Have a nice day.|Bye! See you soon.",
    ),
    ("Ok|Okay|Good|Nice|Great|Cool|Great!", "Glad to hear it. What next?"),
    ("Yes|Yes please", "Okay! What would you like me to do?"),
    ("No|No thanks|No, thank you", "Okay. Tell me when you need something."),
    (
        "Tell me a joke|Tell a joke|Do you know a joke?|Make me laugh",
        "Why did the computer go to the doctor? It had a virus.|"
        "What do you call a sleeping dinosaur? A dino-snore.|"
        "Why was the math book sad? It had too many problems.",
    ),
    ("How old are you?|When were you born?", "I am a program, so I have no age."),
    ("What is the meaning of life?", "Some say it is 42."),
    (
        "What time is it?|What day is it today?|What is the date?",
        "I have no clock, so I cannot tell.",
    ),
    ("What is the weather like?|How is the weather?", "I cannot look outside, so I do not know."),
    (
        "Write a haiku|Write a haiku about the sea|Write me a haiku",
        "Quiet morning waves\nA small boat leaves the harbor\nThe light follows it",
    ),
    (
        "Write a poem|Write a short poem|Write me a poem|Tell me a poem",
        "The moon is bright, the night is long,\nThe river sings a quiet song.\n"
        "The stars above, the town below,\nThe wind is soft, the clouds are slow.",
    ),
    (
        "Write hello world in Python|Write a hello world program in Python|"
        "Write a Python program that prints hello world|Show me some Python code",
        '```python\nprint("Hello, world!")\n```',
    ),
    (
        "Write a Python function that adds two numbers|Write a function that adds two numbers",
        "```python\ndef add(a, b):\n    return a + b\n```",
    ),
    ("What is Python?", "Python is a programming language."),
    ("What is water?", "Water is what rivers, lakes and seas are made of."),
    ("What is the sun?", "The sun is a star. The Earth goes around it."),
    ("What is the moon?", "The moon goes around the Earth."),
    ("Is the sky blue?", "Yes, the sky is blue."),
    ("Why is the sky blue?", "Air scatters blue light more than red light."),
    ("Is fire hot?|Is ice cold?", "Yes, it is."),
    (
        "What is an LLM?|What is a language model?",
        "A language model is a program that guesses the next word.",
    ),
    ("Are you conscious?|Do you have feelings?", "No. I am a program."),
    ("I love you|I like you", "Thank you! That is kind."),
    ("I am sad|I feel bad", "I am sorry to hear that. I hope it gets better."),
    ("I am bored", "Shall I tell you a story?"),
    ("Name three colors|Name 3 colors", "Red, green and blue."),
    ("Name three animals|Name 3 animals", "Cat, dog and horse."),
    ("Name three fruits|Name 3 fruits|List three fruits", "Apple, banana and cherry."),
    ("How many days are in a week?", "A week has seven days."),
    ("How many months are in a year?", "A year has twelve months."),
    ("How many hours are in a day?", "A day has 24 hours."),
    ("How many minutes are in an hour?", "An hour has 60 minutes."),
    ("What is the largest planet?|What is the biggest planet?", "Jupiter is the largest planet."),
    (
        "Say the alphabet|What is the alphabet?|Recite the alphabet",
        "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z",
    ),
    ("Explain gravity|What is gravity?", "Gravity pulls things toward each other."),
)


def small_talk(rng: Random) -> Turn:
    """Greet, thank, chat."""
    weights = [4 if index < 12 else 1 for index in range(len(SMALL_TALK))]
    asks, answers = rng.choices(SMALL_TALK, weights)[0]
    choices = tuple(answers.split("|"))
    ask = rng.choice(asks.split("|"))
    thought = f"The user says: {ask} I answer kindly."
    return Turn("small talk", ask, rng.choice(choices), key="", thought=thought, accept=choices)
