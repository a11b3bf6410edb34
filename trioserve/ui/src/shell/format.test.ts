import assert from "node:assert/strict";
import { test } from "node:test";
import { bytes, contextSize, count, era, modelName, percent, quoted, seconds, speed, tokens } from "./format";

test("numbers", () => {
  assert.equal(count(1234567.4), "1,234,567");
  assert.equal(tokens(1), "1 token");
  assert.equal(tokens(1000), "1,000 tokens");
  assert.equal(contextSize(4096), "4K");
  assert.equal(contextSize(131072), "128K");
  assert.equal(contextSize(40000), "40K");
  assert.equal(contextSize(500), "500");
  assert.equal(speed(0), "0 tokens/s");
  assert.equal(speed(4.26), "4.3 tokens/s");
  assert.equal(speed(1245.1), "1,245 tokens/s");
});

test("sizes change their unit where four digits would begin", () => {
  assert.equal(bytes(0), "0 B");
  assert.equal(bytes(999), "999 B");
  assert.equal(bytes(1000), "1.0 kB");
  assert.equal(bytes(999_600), "1.0 MB");
  assert.equal(bytes(2_542_848), "2.5 MB");
  assert.equal(bytes(241_000_000), "241 MB");
});

test("times", () => {
  assert.equal(seconds(0.04), "0.0 s");
  assert.equal(seconds(9.94), "9.9 s");
  assert.equal(seconds(9.96), "10 s");
  assert.equal(seconds(59.4), "59 s");
  assert.equal(seconds(60), "1 min");
  assert.equal(seconds(3900), "1 h 5 min");
  assert.equal(seconds(7200), "2 h");
});

test("a percentage is 0 or 100 only if it is so", () => {
  assert.equal(percent(0), "0%");
  assert.equal(percent(0.001), "<1%");
  assert.equal(percent(0.5), "50%");
  assert.equal(percent(0.999), "99%");
  assert.equal(percent(1), "100%");
});

test("chats are grouped by calendar days, not by hours", () => {
  const now = new Date(2026, 10, 22, 0, 30).getTime();
  const at = (day: number, hour: number) => new Date(2026, 10, day, hour).getTime();
  assert.equal(era(at(22, 0), now), "Today");
  assert.equal(era(now + 60_000, now), "Today");
  assert.equal(era(at(21, 23), now), "Yesterday");
  assert.equal(era(at(21, 0), now), "Yesterday");
  assert.equal(era(at(20, 23), now), "Previous 7 days");
  assert.equal(era(at(15, 0), now), "Previous 7 days");
  assert.equal(era(at(14, 23), now), "Previous 30 days");
  assert.equal(era(at(1, 12) - 30 * 86_400_000, now), "October 2026");
});

test("a model goes by the name of its file", () => {
  assert.equal(modelName("/models/gemma-3-270m.gguf"), "gemma-3-270m");
  assert.equal(modelName("ggml-org/gemma-3:Q4_K_M"), "gemma-3:Q4_K_M");
  assert.equal(modelName("plain"), "plain");
});

test("a quoted text is isolated from what is around it", () => {
  assert.equal(quoted("a\u202eb"), "“\u2068a\u202eb\u2069”");
});
