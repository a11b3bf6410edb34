"""Chat: templates rendered to prompts, and the model's output parsed back into messages.

`template` renders OpenAI's messages through the model's own template, which runs in a metered
`sandbox`; `parser` takes the text that the model generates, piece by piece, apart into content,
reasoning and tool calls, by a declarative description of the model's `formats`.
"""
