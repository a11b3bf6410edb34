import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";

import { signal } from "@preact/signals";

import "../testing/browser";
import { answered, delta, FakeServer, type Asked, type Reply } from "../testing/fake_server";
import type { McpEntry } from "../types";
import { callsBeingMade, denyCalls, makeAlways, makeCalls, startCalls } from "./calls";
import { newChat, openChat } from "./chats";
import { mcpServers, pageTools, readPrompt, readResource, startMcp } from "./mcp";
import { runs } from "./runs";
import { settings } from "./settings";
import { send } from "./talk";
import { choose } from "./tools";

const ENTRY: McpEntry = { id: "abcd-1", name: "Wetter <b>", url: "https://w.example/mcp?a=b", token: "kéy" };
const PROXY = "POST /cors-proxy";

let fake: FakeServer;
let results: Record<string, unknown>;

/** The MCP server's answer to a request. */
function reply({ body }: Asked): Reply {
  if (body.id === undefined) return { status: 202 };
  const result = results[body.method];
  const error = { code: -32601, message: "There is no such method." };
  const answer = { jsonrpc: "2.0", id: body.id, ...(result === undefined ? { error } : { result }) };
  return { body: answer, headers: body.method === "initialize" ? { "Mcp-Session-Id": "s1" } : {} };
}

const tool = (name: string, readOnlyHint: boolean) => ({
  name, description: `Does ${name}.`, inputSchema: { type: "object" }, annotations: { readOnlyHint },
});

async function until(fits: () => boolean): Promise<void> {
  const began = Date.now();
  while (!fits()) {
    assert.ok(Date.now() - began < 20_000, "it did not come to pass");
    await new Promise((resolve) => setTimeout(resolve, 2));
  }
}

startMcp(signal(true));
startCalls();

beforeEach(async () => {
  fake = new FakeServer();
  fake.install();
  fake.routes.set(PROXY, reply);
  results = {
    initialize: { protocolVersion: "2025-06-18", capabilities: { tools: {}, prompts: {}, resources: {} } },
    "tools/list": { tools: [tool("read", true), tool("write it!", false)] },
    "prompts/list": { prompts: [{ name: "greet", arguments: [{ name: "who", required: true }] }] },
    "resources/list": { resources: [{ uri: "file:///a", name: "a.txt" }] },
    "tools/call": { content: [{ type: "text", text: "It rains." }] },
  };
  newChat();
  settings.value = { ...settings.peek(), mcp: [] };
  settings.value = { ...settings.peek(), mcp: [ENTRY] };
  await until(() => mcpServers.peek()[0]?.state === "connected");
});

test("a server is asked through the proxy for what it has", () => {
  const asked = fake.asked.filter(({ path }) => path === "/cors-proxy");
  assert.deepEqual(new Set(asked.map(({ query }) => query.get("url"))), new Set([ENTRY.url]));
  const header = (name: string) => asked.at(-1)!.headers.get(`x-trioserve-proxy-header-${name}`);
  assert.deepEqual([header("mcp-session-id"), header("mcp-protocol-version")], ["s1", "2025-06-18"]);
  assert.deepEqual(pageTools.peek().map(({ name, writes }) => [name, writes]), [
    ["read_abcd", false], ["write_it__abcd", true],
  ]);
  const [{ prompts, resources }] = mcpServers.peek() as [(typeof mcpServers.value)[number]];
  assert.deepEqual([prompts[0]!.title, prompts[0]!.arguments[0]!.isRequired, resources[0]!.uri], ["greet", true, "file:///a"]);
});

test("a list comes in pages, and a session that is gone begins again", async () => {
  let pages = 0;
  fake.routes.set(PROXY, (asked) => {
    const { body } = asked;
    if (body.method === "tools/list" && ++pages === 1) return { status: 404, body: { error: { message: "gone", code: 404 } } };
    if (body.method === "tools/list") results["tools/list"] = { tools: [tool(`t${pages}`, true)], nextCursor: pages < 4 ? "more" : undefined };
    return reply(asked);
  });
  settings.value = { ...settings.peek(), mcp: [{ ...ENTRY, id: "efgh" }] };
  await until(() => mcpServers.peek()[0]?.state === "connected");
  assert.deepEqual(pageTools.peek().map(({ own }) => own), ["t2", "t3", "t4"]);
});

test("what goes wrong is said of the server", async () => {
  fake.routes.set(PROXY, () => ({ status: 403, body: { error: { message: "Not on the list.", code: 403 } } }));
  settings.value = { ...settings.peek(), mcp: [{ ...ENTRY, id: "other" }] };
  await until(() => mcpServers.peek()[0]?.state === "failed");
  assert.equal(mcpServers.peek()[0]!.message, "Not on the list.");
  settings.value = { ...settings.peek(), mcp: [] };
  assert.deepEqual(pageTools.peek(), []);
});

/** Ask something; the model calls these tools and then answers. */
async function ask(...names: string[]): Promise<void> {
  fake.onSession = (session, { body }) => {
    if (body.messages.at(-1).role === "tool") return answered(session, ["done"]);
    const calls = names.map((name, index) => ({ index, id: `c${index}`, function: { name, arguments: "{}" } }));
    session.event(delta({ tool_calls: calls }));
    session.event(delta({}, "tool_calls"));
    session.add("data: [DONE]\n\n");
    session.end();
  };
  await send("What is the weather?", []);
  await until(() => runs.peek().size === 0);
}

const path = () => openChat.peek()!.path;
const quiet = () => until(() => runs.peek().size === 0 && callsBeingMade.peek().size === 0 && path().at(-1)!.content === "done");

test("a tool that only reads is called, and its result is for the model", async () => {
  const [read] = pageTools.peek();
  await choose({ on: [read!.name] });
  await ask(read!.name);
  await quiet();
  assert.deepEqual(path().map(({ role, content }) => [role, content]), [
    ["user", "What is the weather?"], ["assistant", ""], ["tool", "It rains."], ["assistant", "done"],
  ]);
  const [first, second] = fake.asked.filter(({ path: at }) => at.endsWith("completions"));
  assert.deepEqual(first!.body.tools.map((one: any) => one.function.name), [read!.name]);
  const told = second!.body.messages.at(-1);
  assert.deepEqual([told.role, told.content, told.tool_call_id], ["tool", "It rains.", "c0"]);
});

test("a tool that may write waits for a person, who can deny it or allow it for the chat", async () => {
  const write = pageTools.peek()[1]!;
  const calls = () => fake.asked.filter(({ body }) => body?.method === "tools/call").length;
  await ask(write.name);
  assert.equal(path().length, 2);
  await denyCalls(path().at(-1)!);
  await quiet();
  assert.deepEqual([path()[2]!.content, path()[2]!.state, calls()], ["The user did not allow this call.", "stopped", 0]);
  await ask(write.name);
  await makeAlways(path().at(-1)!);
  await quiet();
  assert.equal(calls(), 1);
  await ask(write.name);
  await quiet();
  assert.equal(calls(), 2);
});

test("several calls get their results in order, and a failure is for the model", async () => {
  const [read, write] = pageTools.peek();
  results["tools/call"] = undefined;
  await ask(read!.name, write!.name);
  await makeCalls(path().at(-1)!);
  await quiet();
  const failed = JSON.stringify({ error: "There is no such method." });
  assert.deepEqual(path().slice(2).map(({ content }) => content), [failed, failed, "done"]);
  const { messages } = fake.asked.filter(({ path: at }) => at.endsWith("completions")).at(-1)!.body;
  assert.deepEqual(messages.slice(-2).map((one: any) => one.tool_call_id), ["c0", "c1"]);
});

test("prompts and resources are read", async () => {
  results["prompts/get"] = { messages: [{ role: "user", content: { type: "text", text: "Hello, Ada" } }] };
  assert.equal(await readPrompt(ENTRY.id, "greet", { who: "Ada" }), "Hello, Ada");
  const [{ resources }] = mcpServers.peek() as [(typeof mcpServers.value)[number]];
  results["resources/read"] = { contents: [{ uri: "file:///a", mimeType: "text/plain", text: "inside" }] };
  const file = await readResource(ENTRY.id, resources[0]!);
  assert.deepEqual([file.name, file.type, await file.text()], ["a.txt", "text/plain", "inside"]);
  results["resources/read"] = { contents: [{ uri: "file:///a", blob: "aGk=" }] };
  assert.equal(await (await readResource(ENTRY.id, resources[0]!)).text(), "hi");
});
