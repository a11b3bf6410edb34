import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would be downloaded

import dspy


def add(a: float, b: float) -> float:
    """Add."""
    return a + b


arguments = {"api_base": f"{os.environ['URL']}/v1", "api_key": "none", "cache": False}
dspy.configure(lm=dspy.LM("openai/scripted", **arguments))
print("ReAct:", dspy.ReAct("question -> text", tools=[add])(question="Add the numbers.").text)
