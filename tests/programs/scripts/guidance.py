import os

from guidance import assistant, gen, user
from guidance.models import OpenAI

model = OpenAI("scripted", base_url=f"{os.environ['URL']}/v1", api_key="none", echo=False)
with user():
    model += "Add the numbers."
with assistant():
    model += gen("answer", max_tokens=50)
print("chat:", model["answer"])
