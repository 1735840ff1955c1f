"use strict";
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const POLL_MS = 2000;
let state = null;
let running = null; // AbortController of the answer that streams

// -- small things ------------------------------------------------------------------------------------------------

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}
function drawn(name, attributes) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}
function seconds(value) {
  if (value == null) return "n/a";
  if (value < 0.9995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  return `${value < 100 ? value.toPrecision(3) : Math.round(value)} s`;
}
function bytes(value) {
  if (value == null) return "n/a";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (value >= 1000 && i < units.length - 1) { value /= 1024; i += 1; }
  return `${i ? value.toPrecision(3) : Math.round(value)} ${units[i]}`;
}
const percent = (value) => (value == null ? "n/a" : `${(value * 100).toFixed(value > 0 && value < 0.0995 ? 1 : 0)} %`);
const number = (value) => (value == null ? "n/a" : value < 100 ? value.toFixed(1) : Math.round(value).toLocaleString("en"));
function small(value) {
  if (value == null) return "–";
  if (value === 0) return "0";
  return Math.abs(value) >= 1e-4 && Math.abs(value) < 1e6 ? Number(value.toPrecision(3)).toString() : value.toExponential(1);
}
function say(id, text, kind = "") {
  const node = $(id);
  if (node.textContent !== text) node.textContent = text;
  node.className = `note ${kind}`;
}

// -- numbers -----------------------------------------------------------------------------------------------------

const TILES = [
  ["Throughput", (n) => `${number(n.tokens_per_s)}`, () => "tokens per second"],
  ["First token", (n) => seconds(n.ttft_s.p50), (n) => (n.ttft_s.num ? `P95 ${seconds(n.ttft_s.p95)}, ${n.ttft_s.num} answers` : "no answer yet")],
  ["Between tokens", (n) => seconds(n.itl_s.p50), (n) => (n.itl_s.num ? `P95 ${seconds(n.itl_s.p95)}` : "no answer yet")],
  ["Requests", (n) => `${n.num_running}`, (n) => `running, ${n.num_waiting} waiting`],
  ["KV memory", (n) => bytes(total(n.kv_bytes)), (n) => (n.kv_limit_bytes ? `of ${bytes(n.kv_limit_bytes)}` : "no limit set")],
  ["Prefix hits", (n) => (n.num_prefix_tokens ? percent(n.num_prefix_hits / n.num_prefix_tokens) : "n/a"), () => "of prompt tokens"],
];
const total = (tiers) => Object.values(tiers).reduce((sum, value) => sum + value, 0);

function showTiles(now) {
  const tiles = $("tiles");
  if (!tiles.children.length) {
    for (const [name] of TILES) tiles.append(element("div", {}, element("dt", {}, name), element("dd", {}, "", element("small"))));
  }
  TILES.forEach(([, value, below], i) => {
    const place = tiles.children[i].lastChild;
    place.firstChild.nodeValue = value(now);
    place.lastChild.textContent = below(now);
  });
}

// -- charts ------------------------------------------------------------------------------------------------------

const CHARTS = [
  { title: "Tokens per second", lines: ["tokens_per_s"], names: ["tokens/s"], format: number },
  { title: "Time to first token", lines: ["ttft_p50", "ttft_p95"], names: ["median", "P95"], format: seconds },
  { title: "Time between tokens", lines: ["itl_p50", "itl_p95"], names: ["median", "P95"], format: seconds },
  { title: "KV memory by tier", lines: ["kv_hot", "kv_warm"], names: ["hot", "warm"], format: bytes, hold: true },
];
const WIDTH = 280, HEIGHT = 116, LEFT = 2, RIGHT = 276, TOP = 10, BOTTOM = 110;

function makeChart(chart) {
  const caption = element("figcaption");
  const names = element("span", {}, chart.title);
  if (chart.lines.length > 1) {
    names.append(element("br"));
    chart.names.forEach((name, i) => names.append(element("span", { class: i ? "key second" : "key" }), `${name}  `));
  }
  chart.output = element("output");
  caption.append(names, chart.output);
  chart.svg = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", tabindex: "0" });
  chart.at = null;
  chart.svg.addEventListener("pointermove", (event) => {
    const box = chart.svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH;
    chart.at = Math.round(((x - LEFT) / (RIGHT - LEFT)) * 179);
    showChart(chart);
  });
  const leave = () => { chart.at = null; showChart(chart); };
  chart.svg.addEventListener("pointerleave", leave);
  chart.svg.addEventListener("blur", leave);
  chart.svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -12, PageDown: 12 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    chart.at = Math.min(179, Math.max(0, (chart.at ?? 179) + step));
    showChart(chart);
  });
  const axis = element("div", { class: "axis", "aria-hidden": "true" }, element("span", {}, "15 min ago"), element("span", {}, "now"));
  $("charts").append(element("figure", { class: "chart" }, caption, chart.svg, axis));
}

function showChart(chart) {
  if (!state) return;
  const series = state.series, count = series.ago_s.length, offset = 180 - count;
  const lines = chart.lines.map((name) => (chart.hold ? held(series[name]) : series[name]));
  const seen = lines.flat().filter((value) => value != null);
  const most = Math.max(...seen, 1e-9) * 1.08;
  const x = (i) => LEFT + ((i + offset) / 179) * (RIGHT - LEFT);
  const y = (value) => BOTTOM - (value / most) * (BOTTOM - TOP);
  const parts = [0, 0.5, 1].map((part) => drawn("line", { class: "grid", x1: LEFT, x2: RIGHT, y1: y(most * part), y2: y(most * part), "vector-effect": "non-scaling-stroke" }));
  if (seen.length && chart.lines[0] === "tokens_per_s") {
    parts.push(drawn("path", { class: "area", d: `M${x(0)},${BOTTOM} ${lines[0].map((v, i) => `L${x(i)},${y(v)}`).join(" ")} L${x(count - 1)},${BOTTOM} Z` }));
  }
  lines.forEach((values, which) => {
    const second = which ? " second" : "";
    const joined = chart.hold || chart.lines[0] === "tokens_per_s" ? 1 : 12; // gaps of up to a minute are bridged
    const there = values.flatMap((value, i) => (value == null ? [] : [i]));
    let path = "", dots = "";
    there.forEach((i, k) => {
      const place = `${x(i).toFixed(1)},${y(values[i]).toFixed(1)}`;
      const starts = !(i - there[k - 1] <= joined), ends = !(there[k + 1] - i <= joined);
      path += `${starts ? "M" : "L"}${place} `;
      if (starts && ends) dots += `M${place} l0.01,0 `;
    });
    if (path) parts.push(drawn("path", { class: `line${second}`, d: path, "vector-effect": "non-scaling-stroke" }));
    if (dots) parts.push(drawn("path", { class: `line dot${second}`, d: dots, "vector-effect": "non-scaling-stroke" }));
  });
  const index = chart.at == null ? null : chart.at - offset;
  if (index != null) parts.push(drawn("line", { class: "cursor", x1: x(index), x2: x(index), y1: TOP, y2: BOTTOM, "vector-effect": "non-scaling-stroke" }));
  chart.svg.replaceChildren(...parts);
  const read = (values, i) => (i < 0 || values[i] == null ? "–" : chart.format(values[i]));
  const latest = (values) => values.findLast((value) => value != null);
  if (index != null) {
    const ago = index < 0 ? (179 - chart.at) * series.step_s : series.ago_s[index];
    chart.output.textContent = `${ago ? `${duration(ago)} ago` : "now"}: ${lines.map((v) => read(v, index)).join(" / ")}`;
  } else {
    chart.output.textContent = seen.length ? `up to ${chart.format(Math.max(...seen))}` : "nothing yet";
  }
  const spoken = lines.map((v, i) => `${chart.names[i]} ${chart.format(latest(v))}`).join(", ");
  chart.svg.setAttribute("aria-label", `${chart.title}, last value: ${spoken}. Arrow keys read earlier values.`);
}
const duration = (s) => (s < 60 ? `${s} s` : `${Math.floor(s / 60)} min${s % 60 ? ` ${s % 60} s` : ""}`);
function held(values) {
  let last = null;
  return values.map((value) => (last = value ?? last));
}

// -- configs -----------------------------------------------------------------------------------------------------

const opened = new Set(); // evidence tables the user has opened or closed, by epoch
const closed = new Set();
let listed = "";

function showEpochs(rollout) {
  const hasCanary = rollout.canary != null;
  const guard = rollout.guard ? "" : " The guard is off.";
  const whole = rollout.weight >= 100 && hasCanary;
  const scored = `${rollout.num_scored} of its answers scored so far`;
  const until = whole && rollout.promote_after != null ? `; it counts as good after ${rollout.promote_after}` : "";
  say("split", (hasCanary
    ? `Epoch ${rollout.canary} gets ${small(rollout.weight)} % of new requests, ${scored}${until}. Epoch ${rollout.stable} is the last good one.`
    : `Epoch ${rollout.stable} serves everybody.`) + guard);
  const key = $("admin-key").value !== "";
  $("promote").disabled = !(key && hasCanary);
  $("rollback").disabled = !(key && (hasCanary || rollout.epochs.some((epoch) => epoch.status === "retired")));
  $("rollback").textContent = hasCanary ? "Roll back" : "Back to the one before";
  const text = JSON.stringify(rollout);
  if (text === listed) return;
  listed = text;
  const focused = document.activeElement?.closest?.("#list summary")?.dataset.epoch;
  $("list").replaceChildren(...rollout.epochs.slice(0, 12).map((epoch) => card(epoch, rollout)));
  if (focused) document.querySelector(`#list summary[data-epoch="${focused}"]`)?.focus();
}

function card(epoch, rollout) {
  const live = epoch.epoch === rollout.stable || epoch.epoch === rollout.canary;
  const kind = { stable: "stable", canary: "canary", "rolled back": "back" }[epoch.status] ?? "";
  const head = element("div", { class: "epoch" }, element("strong", {}, `Epoch ${epoch.epoch}`), element("span", { class: `badge ${kind}` }, epoch.status));
  const when = new Date(epoch.created_s * 1000);
  head.append(element("time", { datetime: when.toISOString() }, `${when.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" })} by ${epoch.source}`));
  const item = element("li", {}, head);
  if (live) {
    const bar = element("i");
    bar.style.width = `${epoch.weight}%`;
    item.append(element("div", { class: `share ${kind}`, role: "img", "aria-label": `${small(epoch.weight)} % of new requests` }, bar));
    item.append(element("p", { class: "note" }, `${small(epoch.weight)} % of new requests`));
  }
  if (epoch.reason) item.append(element("p", { class: `note ${kind === "back" ? "bad" : ""}` }, epoch.reason));
  const rows = epoch.evidence.filter((row) => row.num_answers > 0);
  // open while it is gathered, and afterwards where it says why the newest config is gone: a config may come and go between two polls
  const isNews = epoch.status === "canary" || (epoch.status === "rolled back" && epoch === rollout.epochs[0]);
  if (rows.length) item.append(evidence(epoch, rows, isNews));
  return item;
}

function evidence(epoch, rows, isNews) {
  const details = element("details");
  details.open = opened.has(epoch.epoch) || (isNews && !closed.has(epoch.epoch));
  const worst = rows.reduce((most, row) => Math.max(most, progress(row)), 0);
  const judged = rows.some((row) => row.evidence != null);
  const verdict = worst >= 1 ? "Evidence: alarm" : `Evidence: ${Math.round(worst * 100)} % of the way to an alarm`;
  const summary = element("summary", { "data-epoch": epoch.epoch }, judged ? verdict : "Evidence");
  details.addEventListener("toggle", () => {
    (details.open ? opened : closed).add(epoch.epoch);
    (details.open ? closed : opened).delete(epoch.epoch);
  });
  const head = element("tr", {}, ...["", "answers", "mean", "stable", "alarm"].map((text) => element("th", { scope: "col" }, text)));
  const body = rows.map((row) => {
    const meter = element("meter", { min: 0, max: 1, low: 0.5, high: 0.9, optimum: 0, value: progress(row), "aria-label": `${Math.round(progress(row) * 100)} % of an alarm` });
    const show = { s: seconds, bytes }[row.unit] ?? small;
    return element("tr", {},
      element("th", { scope: "row", title: `tolerance ${row.tolerance}${row.is_relative ? " (relative)" : ` ${row.unit}`}, ${row.num_compared} comparisons, evidence ${small(row.evidence)} of ${small(row.needed)}` }, row.title),
      element("td", {}, String(row.num_answers)), element("td", {}, show(row.mean)),
      element("td", {}, row.stable_mean == null ? "–" : show(row.stable_mean)), element("td", {}, row.evidence == null ? "–" : meter));
  });
  details.append(summary, element("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": `Evidence of epoch ${epoch.epoch}` }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...body))));
  return details;
}
/** How far the wealth of the bet has come on its way to an alarm, from 0 to 1. */
const progress = (row) => (row.evidence == null ? 0 : Math.min(1, Math.max(0, Math.log(row.evidence) / Math.log(row.needed))));

async function admin(method, path, body, done) {
  say("answer", "…");
  try {
    const response = await fetch(`/admin/${path}`, {
      method,
      headers: { authorization: `Bearer ${$("admin-key").value}`, ...(body ? { "content-type": "application/json" } : {}) },
      ...(body ? { body: JSON.stringify(body) } : {}),
    });
    const content = await response.json();
    if (!response.ok) throw new Error(content.error?.message ?? `status ${response.status}`);
    say("answer", done(content), "good");
    await poll();
    return content;
  } catch (error) {
    say("answer", error.message, "bad");
    return null;
  }
}

function startCanary(event) {
  event.preventDefault();
  let config;
  try {
    config = JSON.parse($("config").value || "{}");
  } catch (error) {
    say("answer", `The config is not valid JSON: ${error.message}`, "bad");
    return;
  }
  admin("POST", "canary", { config, weight: Number($("weight").value) }, (said) => `Epoch ${said.epoch} gets ${said.weight} % of new requests.`);
}

// -- try it ------------------------------------------------------------------------------------------------------

async function ask(event) {
  event.preventDefault();
  if (running || !state) return;
  running = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  $("output").textContent = "";
  say("try-note", "waiting for the first token");
  const key = $("api-key").value, began = performance.now();
  const body = { model: state.model, max_tokens: Number($("max-tokens").value) || 128, temperature: Number($("temperature").value), stream: true, stream_options: { include_usage: true } };
  if (state.is_chat) body.messages = [{ role: "user", content: $("prompt").value }];
  else body.prompt = $("prompt").value;
  try {
    const response = await fetch(`/v1/${state.is_chat ? "chat/" : ""}completions`, {
      method: "POST", signal: running.signal, body: JSON.stringify(body),
      headers: { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) },
    });
    if (!response.ok) throw new Error((await response.json()).error?.message ?? `status ${response.status}`);
    const epoch = response.headers.get("x-gsm-epoch");
    let first = null, tokens = 0;
    for await (const chunk of events(response.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices[0];
      const text = choice?.delta?.content ?? choice?.text ?? "";
      if (text && first == null) first = performance.now();
      if (text) $("output").append(text);
      if (chunk.usage) tokens = chunk.usage.completion_tokens;
      say("try-note", `epoch ${epoch}${first ? `, first token after ${seconds((first - began) / 1000)}` : ""}`);
    }
    const rate = first && tokens > 1 ? `, ${tokens} tokens, ${number((tokens - 1) / ((performance.now() - first) / 1000))} per second` : "";
    say("try-note", `epoch ${epoch}${first ? `, first token after ${seconds((first - began) / 1000)}` : ""}${rate}`, "good");
  } catch (error) {
    say("try-note", error.name === "AbortError" ? "stopped" : error.message, error.name === "AbortError" ? "" : "bad");
  } finally {
    running = null;
    $("send").disabled = false;
    $("stop").disabled = true;
  }
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    pending += value;
    const parts = pending.split("\n\n");
    pending = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

// -- life of the page --------------------------------------------------------------------------------------------

function showHealth(text, isBad) {
  if ($("health").textContent !== text) $("health").textContent = text;
  $("health").className = isBad ? "bad" : "";
}

async function poll() {
  try {
    const response = await fetch("/live");
    if (!response.ok) throw new Error(`the server answers ${response.status}`);
    state = await response.json();
  } catch (error) {
    showHealth(`no connection: ${error.message}`, true);
    return;
  }
  $("model").textContent = state.model;
  showHealth(state.health === "ok" ? `up ${duration(Math.floor(state.uptime_s / 60) * 60 || Math.round(state.uptime_s))}` : state.health, state.health !== "ok");
  $("admin").hidden = !state.has_admin;
  $("no-admin").hidden = state.has_admin;
  $("key-field").hidden = !state.needs_key;
  showTiles(state.now);
  CHARTS.forEach(showChart);
  showEpochs(state.rollout);
}

const THEMES = { auto: "◐ auto", light: "○ light", dark: "● dark" };
function setTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  $("theme").textContent = THEMES[name];
  $("theme").setAttribute("aria-label", `Colours: ${name === "auto" ? "as the system" : name}`);
  localStorage.setItem("gsm-theme", name);
}

CHARTS.forEach(makeChart);
setTheme(localStorage.getItem("gsm-theme") ?? "auto");
$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  setTheme(names[(names.indexOf(localStorage.getItem("gsm-theme") ?? "auto") + 1) % names.length]);
});
$("admin").addEventListener("submit", startCanary);
$("admin-key").addEventListener("input", () => state && showEpochs(state.rollout));
$("promote").addEventListener("click", () => admin("POST", "promote", { epoch: state.rollout.canary }, (said) => `Epoch ${said.epoch} is the stable one now.`));
$("rollback").addEventListener("click", () => admin("POST", "rollback", { reason: "by hand, from the page" }, (said) => (said.status === "stable" ? `Epoch ${said.epoch} serves everybody.` : `Epoch ${said.epoch} was taken back.`)));
$("load").addEventListener("click", async () => {
  const said = await admin("GET", "config", null, (content) => `This is the config of epoch ${content.epoch}.`);
  if (said) $("config").value = JSON.stringify(said.config, null, 2);
});
$("weight").addEventListener("input", () => { $("weight-value").textContent = `${$("weight").value} %`; });
$("try").addEventListener("submit", ask);
$("prompt").addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) ask(event); });
$("stop").addEventListener("click", () => running?.abort());
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
setInterval(() => { if (!document.hidden) poll(); }, POLL_MS);
poll();
