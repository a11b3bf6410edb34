import { Ollama } from "ollama";

const client = new Ollama({ host: process.env.URL });
const messages = [{ role: "user", content: "Add the numbers." }];
const parameters = { type: "object", properties: { a: { type: "number" }, b: { type: "number" } } };
const tools = [{ type: "function", function: { name: "add", description: "Add.", parameters } }];
for (;;) {
  const message = { role: "assistant", content: "", tool_calls: [] };
  for await (const part of await client.chat({ model: "scripted", messages, tools, stream: true })) {
    message.content += part.message.content;
    message.tool_calls.push(...(part.message.tool_calls ?? []));
  }
  messages.push(message);
  if (message.tool_calls.length === 0) {
    console.log("chat:", message.content);
    break;
  }
  for (const { function: called } of message.tool_calls) {
    const { a, b } = called.arguments;
    messages.push({ role: "tool", tool_name: called.name, content: String(a + b) });
  }
}
