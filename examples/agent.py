"""A model that calls functions of a program: ``python examples/agent.py``."""

from __future__ import annotations

import trio

from trioserve import (
    AgentRun,
    ApprovalNeeded,
    Config,
    RunEvent,
    Server,
    ToolCalled,
    ToolReturned,
    tool_of,
)
from trioserve.config import logs


async def get_weather(city: str) -> dict[str, object]:
    """Get the weather for a city."""
    await trio.sleep(0.5)  # stands for a call to a weather service
    return {"temperature": 21, "condition": "sunny"}


def send_letter(to: str, text: str) -> str:
    """Send a letter."""
    return f"A letter to {to} is on its way: {text}"


#: A person is asked before the model sends one.
SEND_LETTER = tool_of(send_letter, writes=True)


async def tell(run: AgentRun, event: RunEvent) -> None:
    match event:
        case ToolCalled(call=call):
            print(f"  calls {call.tool.name}({call.arguments})")
        case ApprovalNeeded(call=call):
            answer = await trio.to_thread.run_sync(input, f"  {call.tool.name}: allow it? [y/n] ")
            if answer == "y":
                run.approve(call.id)
            else:
                run.deny(call.id, "the user does not want it")
        case ToolReturned(content=content, seconds=seconds):
            print(f"  has {content} after {seconds:.1f} s")


async def main() -> None:
    config = Config(log_level="warning")
    logs.configure(config)
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    async with Server(config) as server:
        print(question[0]["content"])
        # One limit for all steps. Leaving the block ends the model and the functions.
        with trio.fail_after(60):
            async with server.stream_run(question, [get_weather, SEND_LETTER]) as run:
                async for event in run:
                    await tell(run, event)
        assert run.answer is not None
        print(run.answer.message.content)


if __name__ == "__main__":
    trio.run(main)
