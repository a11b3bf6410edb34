import os

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    text: str


openai = OpenAI(base_url=f"{os.environ['URL']}/v1", api_key="none")
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai, mode=mode)
    answer = client.chat.completions.create(
        model="scripted",
        response_model=Answer,
        messages=[{"role": "user", "content": "Add the numbers."}],
    )
    print(f"{mode.value}:", answer.text)
