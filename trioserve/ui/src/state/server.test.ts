import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";

import "../testing/browser";
import { FakeServer, type Reply } from "../testing/fake_server";
import { ServerError } from "../server/api";
import { pauseFor } from "../server/wake";
import { activity, lookAround } from "./activity";
import { chosenModel } from "./choice";
import { isBusy, load, models } from "./models";
import { contextSizeOf, look, noteTrouble, noteWorks, props, retryNow, server } from "./server";
import { settings } from "./settings";
import { tools } from "./tools";

let fake: FakeServer;
const PROPS = { default_generation_settings: { params: { top_k: 40 }, n_ctx: 4096 }, is_sleeping: false };
const says = (status: number, message: string, more: Partial<Reply> = {}): Reply => ({
  status,
  body: { error: { message, code: status } },
  ...more,
});

beforeEach(() => {
  fake = new FakeServer();
  fake.routes.set("GET /props", () => ({ body: PROPS }));
  fake.routes.set("GET /health", () => ({ body: { status: "ok" } }));
  fake.routes.set("GET /v1/models", () => ({ body: { data: [{ id: "small", meta: { n_ctx: 2048 } }] } }));
  fake.install();
  retryNow();
});

async function stateAfterLook(): Promise<string> {
  retryNow();
  await look();
  return server.peek().state;
}

test("a server is asked what it is, and then only whether it is well", async () => {
  assert.equal(await stateAfterLook(), "ready");
  assert.equal(props.peek()!.default_generation_settings.params.top_k, 40);
  assert.deepEqual(models.peek().map(({ id, status }) => [id, status]), [["small", "loaded"]]);
  assert.equal(chosenModel.peek(), "small");
  assert.deepEqual([contextSizeOf("small"), contextSizeOf("unknown")], [2048, 4096]);
  await look();
  assert.deepEqual([fake.count("GET /props"), fake.count("GET /health")], [1, 2]);
});

test("a router says what its models take, and how far they are", async () => {
  const listed = [
    { id: "a", architecture: { input_modalities: ["text", "image"] }, is_toy: true, example_prompts: ["Hi"], can_remove: true },
    { id: "b", status: { value: "loading", progress: 0.25 }, has_chat_template: false, context_advice: "Short." },
    { id: "c", status: { value: "downloading", progress: { x: { done: 1, total: 4 }, y: { done: 2, total: 8 } } } },
  ];
  fake.routes.set("GET /v1/models", () => ({ body: { data: listed } }));
  await stateAfterLook();
  const [a, b, c] = models.peek();
  assert.deepEqual([a!.takes, a!.toy, a!.examples, a!.removable, a!.hasTemplate, a!.advice], [["image"], true, ["Hi"], true, undefined, ""]);
  assert.deepEqual([b!.takes, b!.toy, b!.progress, b!.hasTemplate, b!.advice], [[], false, 0.25, false, "Short."]);
  assert.equal(c!.progress, 0.25);
  assert.ok(isBusy());
  fake.routes.set("POST /models/load", () => ({ body: { success: true } }));
  fake.routes.set("GET /v1/models", () => ({ body: { data: [{ id: "a" }] } }));
  await load("a");
  assert.deepEqual(fake.asked.find(({ path }) => path === "/models/load")?.body, { model: "a" });
  assert.deepEqual([models.peek().length, isBusy()], [1, false]);
});

test("tools are asked for where there are some, again while none has come, and never elsewhere", async () => {
  await stateAfterLook();
  await look();
  assert.equal(fake.count("GET /tools"), 0);
  const listed: unknown[] = [];
  fake.routes.set("GET /props", () => ({ body: { ...PROPS, endpoint_tools: true } }));
  fake.routes.set("GET /tools", () => ({ body: listed }));
  await stateAfterLook();
  await look();
  listed.push({ tool: "w_get", type: "mcp", mcp_server: "w" });
  await look();
  assert.deepEqual(tools.peek()!.map(({ name, origin }) => [name, origin]), [["w_get", "w"]]);
  await look();
  assert.equal(fake.count("GET /tools"), 3);
  fake.next("GET /tools", says(500, "The box is broken."));
  assert.equal(await stateAfterLook(), "ready");
  fake.next("GET /tools", { isAway: true });
  assert.equal(await stateAfterLook(), "unreachable");
});

test("its troubles have words", async () => {
  const cases: [Reply, string, RegExp][] = [
    [says(503, "Loading model"), "loading", /loading its model/],
    [says(503, "The server is shutting down"), "draining", /shutting down/],
    [says(401, "Invalid API Key"), "needs-key", /requires an API key/],
    [{ isAway: true }, "unreachable", /cannot be reached/],
    [says(503, "The inference engine failed."), "unreachable", /engine failed/],
    [{ status: 502 }, "unreachable", /status 502/],
  ];
  for (const [reply, state, message] of cases) {
    fake.next("GET /props", reply);
    assert.equal(await stateAfterLook(), state);
    assert.match(server.peek().message, message);
    assert.equal(await stateAfterLook(), "ready");
    assert.equal(server.peek().message, "");
  }
  settings.value = { ...settings.peek(), apiKey: "wrong" };
  fake.next("GET /props", says(401, "Invalid API Key"));
  await stateAfterLook();
  assert.match(server.peek().message, /does not know this API key/);
  settings.value = { ...settings.peek(), apiKey: "" };
});

test("a server that drains still answers other routes", async () => {
  await stateAfterLook();
  const drains = says(503, "The server is shutting down");
  fake.next("GET /health", drains, drains);
  await look();
  await look();
  assert.equal(server.peek().state, "draining");
});

test("waits for a server that was away end when it is back", async () => {
  fake.next("GET /health", { isAway: true });
  await stateAfterLook();
  const waited = pauseFor(60_000);
  assert.equal(await stateAfterLook(), "ready");
  await waited;
});

test("a server that was away is asked again for its properties", async () => {
  await stateAfterLook();
  fake.next("GET /health", { isAway: true });
  await look();
  assert.equal(server.peek().state, "unreachable");
  fake.routes.set("GET /v1/models", () => ({ body: { data: [{ id: "large" }] } }));
  await look();
  assert.equal(server.peek().state, "ready");
  assert.equal(chosenModel.peek(), "large");
});

test("a server that is full is so until something works, or its time is over", async () => {
  await stateAfterLook();
  noteTrouble(new ServerError("The queue is full.", 429, "queue_full", 5_000), Date.now() + 60_000);
  await look();
  assert.equal(server.peek().state, "full");
  noteWorks();
  assert.equal(server.peek().state, "ready");
  noteTrouble(new ServerError("The queue is full.", 429), Date.now() - 1);
  await look();
  assert.equal(server.peek().state, "ready");
});

test("a model that sleeps is one that the next message wakes", async () => {
  fake.routes.set("GET /props", () => ({ body: { ...PROPS, is_sleeping: true } }));
  assert.equal(await stateAfterLook(), "sleeping");
});

test("a router's model is asked for its properties, but never loaded for them", async () => {
  const status = { value: "unloaded" };
  fake.routes.set("GET /v1/models", () => ({
    body: { data: [{ id: "a", status }, { id: "b", status: { value: "loaded" } }] },
  }));
  fake.routes.set("GET /props", () => {
    const { query } = fake.asked[fake.asked.length - 1]!;
    const own = { role: "router", default_generation_settings: { params: {}, n_ctx: 0 } };
    return { body: query.get("model") ? PROPS : own };
  });
  await stateAfterLook();
  assert.equal(chosenModel.peek(), "b");
  assert.deepEqual([props.peek()!.role, props.peek()!.default_generation_settings.n_ctx], ["router", 4096]);
  settings.value = { ...settings.peek(), model: "a" };
  const asked = fake.count("GET /props");
  await stateAfterLook();
  assert.equal(fake.count("GET /props"), asked + 1);
  assert.equal(props.peek()!.default_generation_settings.n_ctx, 0);
  settings.value = { ...settings.peek(), model: "" };
});

test("the activity is that of all loaded models, with the speed of each slot", async () => {
  await stateAfterLook();
  let decoded = 10;
  fake.routes.set("GET /slots", () => ({
    body: {
      slots: [
        { id: 0, n_ctx: 100, is_processing: true, state: "decode", paused: false, id_task: 3,
          n_prompt_tokens: 8, n_prompt_tokens_processed: 5, n_prompt_tokens_cache: 3, next_token: [{ n_decoded: decoded }] },
        { id: 1, n_ctx: 100, is_processing: false, state: "idle", paused: false },
      ],
      queue: [{ id_task: 4, position: 1, n_prompt_tokens: 9, priority: 0, waited_s: 0.5, wait_s: null }],
      kv_cache: { cells: 200, used: 21 },
      cache: { kv_bytes: 7, ram_bytes: 6, disk_bytes: 5, ram_tokens: 1, disk_tokens: 0 },
      totals: { prompt_tokens: 8, cached_tokens: 3, generated_tokens: decoded },
      drafts: [{ type: "draft-mtp", checked: 2, tokens: decoded, accepted: 7 }],
    },
  }));
  await lookAround(1_000);
  decoded += 20;
  await lookAround(2_000);
  const { slots, queue, cache, kept, totals, drafts, tokensPerSecond, missing } = activity.peek()!;
  assert.deepEqual(drafts, [{ type: "draft-mtp", tokens: 30, accepted: 7 }]);
  assert.deepEqual(kept, { kv: { bytes: 7, found: 2 }, ram: { bytes: 6, found: 1 }, disk: { bytes: 5, found: 0 } });
  assert.deepEqual(slots!.map((slot) => [slot.state, slot.promptDone, slot.tokensPerSecond]), [["decode", 8, 20], ["idle", 0, 0]]);
  assert.deepEqual([queue!.length, queue![0]!.waitS, cache, totals!.tokens], [1, null, { used: 21, total: 200 }, 30]);
  assert.deepEqual([tokensPerSecond, missing], [20, []]);
});

test("what the server does not tell is said", async () => {
  await stateAfterLook();
  fake.routes.set("GET /slots", () => says(501, "This server does not support slots endpoint."));
  await lookAround();
  assert.equal(activity.peek()!.slots, null);
  assert.match(activity.peek()!.missing[0]!, /--no-slots/);
});
