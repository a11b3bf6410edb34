import os

import outlines
from openai import OpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    text: str


client = OpenAI(base_url=f"{os.environ['URL']}/v1", api_key="none")
answer = outlines.from_openai(client, "scripted")("Add the numbers.", Answer)
print("JSON Schema:", Answer.model_validate_json(answer).text)
