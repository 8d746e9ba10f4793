"use strict";
// The page of a Penstock server: a chat, and the pipeline as it works. It fetches everything from the server that
// has sent it. Sections: fetching, the key, the chat, what the feed says, lanes, why the pipe is slow, events.

const byId = (id) => document.getElementById(id);

function make(tag, name, text) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const pause = (ms) => new Promise((done) => setTimeout(done, ms));
const percent = (share) => `${Math.round(100 * share)} %`;
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

function seconds(value) {
  if (value < 0.0095) return `${(1000 * value).toFixed(1)} ms`;
  return value < 1 ? `${Math.round(1000 * value)} ms` : `${value.toFixed(2)} s`;
}

function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toPrecision(2)} ${units[unit]}`;
}

// --- fetching ----------------------------------------------------------------------------------------------

class Refused extends Error {}  // the server has answered, with an error

async function ask(path, options = {}) {
  for (;;) {
    const key = storedKey();
    const headers = { ...options.headers };
    if (key) headers.authorization = `Bearer ${key}`;
    const answer = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
    if (answer.status === 401) {
      if (isDeclined) throw await refusal(answer);
      await askForKey(key ? "The server does not take this key." : "This server asks for a key.");
      continue;
    }
    if (!answer.ok) throw await refusal(answer);
    return answer;
  }
}

async function refusal(answer) {
  let text = `The server has answered ${answer.status}.`;
  let code = "";
  try {
    const error = (await answer.json()).error;
    text = error.message || text;
    code = error.code || "";
  } catch { /* not an error of ours: the status says enough */ }
  const refused = new Refused(text);
  refused.status = answer.status;
  refused.code = code;
  return refused;
}

// Calls `take` with each event of a stream: {id, event, data}.
async function readEvents(answer, take) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
      const found = { id: "", event: "message", data: "" };
      for (const line of text.slice(0, end).split("\n")) {
        const cut = line.indexOf(": ");
        const field = line.slice(0, cut);
        if (cut > 0 && field in found) found[field] = line.slice(cut + 2);
      }
      text = text.slice(end + 2);
      if (found.data) take(found);
    }
  }
}

// --- the key -----------------------------------------------------------------------------------------------

const KEY = "penstock.key";
let asking = null;
let isDeclined = false;  // the user has closed the dialog: it comes again only where the user does something

function storedKey() {
  try {
    return sessionStorage.getItem(KEY) || localStorage.getItem(KEY) || "";
  } catch { return ""; }
}

function storeKey(key, stays) {
  sessionStorage.removeItem(KEY);
  localStorage.removeItem(KEY);
  if (key) (stays ? localStorage : sessionStorage).setItem(KEY, key);
}

function askForKey(why) {
  if (asking) return asking;
  const dialog = byId("key-dialog");
  setText(byId("key-why"), why);
  byId("key").value = "";
  byId("keep").checked = localStorage.getItem(KEY) !== null;
  dialog.showModal();
  asking = new Promise((done, fail) => {
    dialog.addEventListener("close", () => {
      asking = null;
      isDeclined = dialog.returnValue !== "used";
      if (isDeclined) fail(new Refused("No API key was given."));
      else done();
      dialog.returnValue = "";
    }, { once: true });
  });
  return asking;
}

function setUpKey() {
  const dialog = byId("key-dialog");
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    storeKey(byId("key").value.trim(), byId("keep").checked);
    byId("key").value = "";
    dialog.close("used");
  });
  byId("key-cancel").addEventListener("click", () => dialog.close("cancelled"));
  byId("key-forget").addEventListener("click", () => { storeKey("", false); dialog.close("cancelled"); });
  byId("key-open").addEventListener("click", () => {
    askForKey(storedKey() ? "A key is in use." : "No key is in use.").then(() => feed.restart(), () => {});
  });
}

// --- the chat ----------------------------------------------------------------------------------------------

const CHAT = "penstock.chat";
const RETRIES = 6;

const chat = {
  turns: [],       // {role, text, thinking, error, tokens, sentAt, firstAt, lastAt, finish}
  pending: null,   // {id, last}: the stream that is being read, and the number of its last event
  aborting: null,
  views: [],
  savedAt: 0,
};

function setUpChat() {
  byId("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  });
  byId("stop").addEventListener("click", stop);
  byId("clear").addEventListener("click", () => { stop(); chat.turns = []; drawChat(); saveChat(); byId("prompt").focus(); });
  addEventListener("pagehide", saveChat);
  try {
    const saved = JSON.parse(sessionStorage.getItem(CHAT) || "null");
    if (saved) { chat.turns = saved.turns; chat.pending = saved.pending; }
  } catch { /* a chat that cannot be read is none */ }
  drawChat();
  if (chat.pending) follow(null);
}

function saveChat() {
  chat.savedAt = performance.now();
  try {
    sessionStorage.setItem(CHAT, JSON.stringify({ turns: chat.turns, pending: chat.pending }));
  } catch { /* no room: it will not outlive a reload */ }
}

function randomId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

function send() {
  const text = byId("prompt").value.trim();
  if (!text || chat.pending) return;
  isDeclined = false;
  byId("prompt").value = "";
  chat.turns.push({ role: "user", text });
  const messages = chat.turns.filter((turn) => turn.text).map((turn) => ({ role: turn.role, content: turn.text }));
  chat.turns.push({ role: "assistant", text: "", thinking: "", error: "", tokens: 0, sentAt: Date.now() });
  chat.pending = { id: randomId(), last: 0 };
  saveChat();
  drawChat();
  follow({
    messages,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    max_tokens: Number(byId("limit").value) || undefined,
    temperature: Number(byId("temperature").value),
  });
}

// Reads the pending stream to its end; it goes on behind the last event after a lost connection or a reload.
async function follow(body) {
  const turn = chat.turns[chat.turns.length - 1];
  const pending = chat.pending;
  chat.aborting = new AbortController();
  drawBusy();
  for (let retry = 0; chat.pending === pending; ) {
    const before = pending.last;
    try {
      const answer = body ? await begin(body, pending.id) : await resume(pending);
      body = null;
      await readEvents(answer, (event) => { if (chat.pending === pending) take(turn, event); });
      if (chat.pending !== pending) break;
      throw new TypeError("the stream has ended early");
    } catch (error) {
      if (chat.pending !== pending) break;
      retry = pending.last > before ? 1 : retry + 1;
      if (error instanceof Refused || retry > RETRIES) {
        turn.error = error instanceof Refused ? lostText(error, turn) : "The server cannot be reached.";
        chat.pending = null;
        break;
      }
      body = null;
      setText(chat.views[chat.turns.length - 1].stats, "connection lost, trying again …");
      await pause(Math.min(4000, 250 * 2 ** retry));
    }
  }
  if (chat.pending === null) chat.aborting = null;
  saveChat();
  drawTurn(chat.turns.indexOf(turn));
  drawBusy();
}

function begin(body, id) {
  return ask("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", "x-request-id": id, "x-penstock-resumable": "true" },
    body: JSON.stringify(body),
    signal: chat.aborting.signal,
  });
}

function resume(pending) {
  return ask(`v1/streams/${pending.id}`, {
    headers: { "last-event-id": String(pending.last) },
    signal: chat.aborting.signal,
  });
}

function lostText(error, turn) {
  if (error.code !== "stream_not_found" && error.code !== "events_gone") return error.message;
  if (turn.tokens) return "The rest of this answer is lost: the server does not have it any more.";
  return "The connection was lost before the answer began. Send the message again.";
}

function take(turn, event) {
  if (event.id) chat.pending.last = Number(event.id);
  if (event.data === "[DONE]") {
    chat.pending = null;
  } else {
    const chunk = JSON.parse(event.data);
    if (chunk.error) {
      turn.error = chunk.error.message;
      chat.pending = null;
    } else {
      takeChunk(turn, chunk);
    }
  }
  drawTurn(chat.turns.indexOf(turn));
  if (performance.now() - chat.savedAt > 300) saveChat();
}

function takeChunk(turn, chunk) {
  const choice = chunk.choices[0];
  const delta = choice ? choice.delta : {};
  if (delta.content) turn.text += delta.content;
  const thinking = delta.reasoning_content || delta.reasoning;
  if (thinking) turn.thinking += thinking;
  if (chunk.usage && chunk.usage.completion_tokens > turn.tokens) {
    turn.tokens = chunk.usage.completion_tokens;
    turn.lastAt = Date.now();
    turn.firstAt = turn.firstAt || turn.lastAt;
    turn.firstTokens = turn.firstTokens || turn.tokens;
  }
  if (choice && choice.finish_reason) turn.finish = choice.finish_reason;
}

function stop() {
  const pending = chat.pending;
  if (!pending) return;
  chat.pending = null;
  const turn = chat.turns[chat.turns.length - 1];
  turn.finish = "stopped";
  if (chat.aborting) chat.aborting.abort();
  ask(`v1/streams/${pending.id}`, { method: "DELETE" }).catch(() => {});
  saveChat();
  drawTurn(chat.turns.length - 1);
  drawBusy();
}

function drawBusy() {
  const isBusy = chat.pending !== null;
  byId("stop").hidden = !isBusy;
  byId("send").disabled = isBusy;
  byId("turns").setAttribute("aria-busy", String(isBusy));
}

function drawChat() {
  const place = byId("turns");
  for (const view of chat.views) view.box.remove();
  chat.views = [];
  byId("empty").hidden = chat.turns.length > 0;
  chat.turns.forEach((turn, index) => {
    const box = make("div", `turn ${turn.role}`);
    const view = { box, who: make("div", "who", turn.role === "user" ? "You" : "Model"), thinking: make("div", "thinking"),
      text: make("div", "text"), error: make("div", "error"), stats: make("div", "stats") };
    view.error.setAttribute("role", "alert");
    box.append(view.who, view.thinking, view.text, view.error, view.stats);
    place.append(box);
    chat.views[index] = view;
    drawTurn(index);
  });
  drawBusy();
}

function drawTurn(index) {
  const turn = chat.turns[index];
  const view = chat.views[index];
  if (!turn || !view) return;
  const place = byId("turns");
  const wasAtEnd = place.scrollHeight - place.scrollTop - place.clientHeight < 60;
  for (const part of ["thinking", "text", "error"]) {
    setText(view[part], turn[part] || "");
    view[part].hidden = !turn[part];
  }
  view.stats.hidden = turn.role === "user";
  if (turn.role !== "user") setText(view.stats, statsText(turn, chat.pending && index === chat.turns.length - 1));
  if (wasAtEnd) place.scrollTop = place.scrollHeight;
}

function statsText(turn, isRunning) {
  if (!turn.tokens) return isRunning ? "waiting for the first token …" : turn.finish || "";
  const parts = [plural(turn.tokens, "token"), `first after ${seconds((turn.firstAt - turn.sentAt) / 1000)}`];
  const took = (turn.lastAt - turn.firstAt) / 1000;
  if (took > 0.05) parts.push(`${((turn.tokens - turn.firstTokens) / took).toFixed(1)} tokens/s`);
  if (turn.finish === "length") parts.push("cut at the limit");
  if (turn.finish === "stopped") parts.push("stopped");
  return parts.join(" · ");
}

// --- what the feed says ------------------------------------------------------------------------------------

const FEED_VERSION = 1;
const HISTORY_S = 60;

const feed = {
  aborting: null,
  view: null,      // the newest
  before: null,    // the view at the begin of the current second, for rates
  rates: { tokens: 0, ttft: [], tpot: [] },
  isConnected: false,
  wake: null,

  restart() {
    if (feed.aborting) feed.aborting.abort();
    if (feed.wake) feed.wake();
  },

  async run() {
    for (let failures = 0; ; ) {
      if (document.hidden) {  // nobody looks: nothing is asked for
        await new Promise((done) => { feed.wake = done; });
        feed.wake = null;
        continue;
      }
      feed.aborting = new AbortController();
      try {
        const answer = await ask("debug/pipeline/events?lanes=true", { signal: feed.aborting.signal });
        failures = 0;
        await readEvents(answer, takeEvent);
        feed.lost("The server has ended the feed.");
      } catch (error) {
        if (error.name !== "AbortError") feed.lost(error instanceof Refused ? error.message : "The server cannot be reached.");
        if (error.name === "AbortError") continue;
      }
      failures += 1;
      await Promise.race([pause(Math.min(8000, 400 * 2 ** failures)), new Promise((done) => { feed.wake = done; })]);
      feed.wake = null;
    }
  },

  lost(why) {
    if (feed.isConnected) note("lost", why);
    feed.isConnected = false;
    showHealth("lost", why);
  },
};

function takeEvent(event) {
  const told = JSON.parse(event.data);
  if (event.event === "lanes") {
    takeLanes(told);
  } else if (event.event === "message") {
    if (told.feed_version !== FEED_VERSION) {
      showHealth("lost", `This page knows version ${FEED_VERSION} of the feed, and the server sends ${told.feed_version}. Reload it.`);
      return;
    }
    takeView(told);
  }
}

function takeView(view) {
  const last = feed.view;
  if (!feed.isConnected) { feed.isConnected = true; note("", `Connected to Penstock ${view.version}.`); }
  compare(last, view);
  feed.view = view;
  const span = feed.before ? view.time - feed.before.time : 0;
  if (!feed.before || span < 0) feed.before = view;
  else if (span >= 1) { takeRates(feed.before, view, span); feed.before = view; }
  drawView(view);
}

const total = (view, field) => view.replicas.reduce((sum, replica) => sum + (replica[field] || 0), 0);

function takeRates(old, view, span) {
  feed.rates.tokens = Math.max(0, total(view, "generated_tokens") - total(old, "generated_tokens")) / span;
  const [was, is] = [old.latency, view.latency];
  const mean = (count, sum) => (is[count] > was[count] ? (is[sum] - was[sum]) / (is[count] - was[count]) : null);
  for (const [list, value] of [[feed.rates.ttft, mean("first_tokens", "first_token_s")], [feed.rates.tpot, mean("next_tokens", "next_token_s")]]) {
    list.push(value);
    if (list.length > HISTORY_S) list.shift();
  }
  drawSpark("ttft", feed.rates.ttft);
  drawSpark("tpot", feed.rates.tpot);
}

function showHealth(state, text) {
  const pill = byId("health");
  pill.dataset.state = state;
  const short = text.length > 36 ? text.split(/[:.] /)[0] : text;
  setText(pill, short.length > 60 ? `${short.slice(0, 57)} …` : short);
  pill.title = text;
}

function drawView(view) {
  const broken = view.replicas.filter((replica) => !replica.ready);
  if (broken.length) { showHealth("lost", broken[0].reason || "not ready"); explain(view); }
  else if (view.draining) showHealth("waiting", "shutting down");
  else if (view.replicas.some((replica) => replica.paused)) showHealth("waiting", "paused");
  else showHealth("ready", "ready");
  setText(byId("model"), view.model);
  document.title = `${view.model} · Penstock`;
  setText(byId("epoch"), view.replicas.map((replica) => replica.epoch ?? "–").join(" / "));
  setText(byId("rate"), feed.rates.tokens >= 100 ? Math.round(feed.rates.tokens).toLocaleString("en") : feed.rates.tokens.toFixed(1));
  const stages = view.replicas.flatMap((replica) => replica.stages);
  setText(byId("busy"), stages.length ? percent(stages.reduce((sum, stage) => sum + stage.busy_ratio, 0) / stages.length) : "–");
  for (const name of ["running", "waiting", "inflight"]) setText(byId(name), total(view, name).toLocaleString("en"));
  drawDrafts(view);
  drawTiers(view);
  drawLaneFrames(view);
}

function drawDrafts(view) {
  const drafts = view.replicas.map((replica) => replica.drafts).filter((each) => each && each.drafter);
  const sum = (field) => drafts.reduce((made, each) => made + each[field], 0);
  const text = (value) => (drafts.length ? value.toLocaleString("en") : "–");
  setText(byId("accepted"), text(sum("accepted")));
  setText(byId("refused"), text(Math.max(0, sum("drafted") - sum("accepted") - sum("cancelled"))));
  setText(byId("cancelled"), text(sum("cancelled")));
  setText(byId("drafter"), drafts.length ? `guessed by ${drafts[0].drafter}` : "nobody guesses tokens here");
}

let hostBytes = 0;  // of the host tier, as the settings have it

function drawTiers(view) {
  const kv = view.replicas.map((replica) => replica.kv).filter(Boolean);
  if (!kv.length) return;
  const sum = (pick) => kv.reduce((made, each) => made + pick(each), 0);
  const blocks = sum((each) => each.l1.num_blocks);
  const used = sum((each) => each.l1.used_blocks);
  const asked = sum((each) => each.l1.query_tokens);
  const hits = asked ? `, ${percent(sum((each) => each.l1.hit_tokens) / asked)} of prompt tokens found` : "";
  drawTier("pool", blocks ? used / blocks : 0, `${used.toLocaleString("en")} of ${plural(blocks, "block")}${hits}`);
  const inHost = sum((each) => each.l2.bytes_used);
  if (hostBytes || inHost) {
    const room = hostBytes ? ` of ${bytes(hostBytes)}` : "";
    drawTier("host memory", hostBytes ? inHost / hostBytes : 0, `${bytes(inHost)}${room}, ${bytes(sum((each) => each.l2.bytes_read))} read`);
  }
  const [stored, loaded, failed] = ["stored_blocks", "loaded_blocks", "failed_blocks"].map((name) => sum((each) => each.l3[name]));
  if (stored || loaded || failed) {
    const tried = loaded + failed;
    drawTier("store", tried ? loaded / tried : 0, `${plural(stored, "block")} stored, ${tried ? percent(loaded / tried) : "none"} of loads found`);
  }
}

function drawTier(name, share, text) {
  const place = byId("tiers");
  let row = place.querySelector(`[data-tier="${name}"]`);
  if (!row) {
    row = make("div", "tier");
    row.dataset.tier = name;
    const meter = make("div", "meter");
    meter.setAttribute("role", "meter");
    meter.setAttribute("aria-label", `KV cache: ${name}`);
    meter.setAttribute("aria-valuemin", "0");
    meter.setAttribute("aria-valuemax", "100");
    meter.append(make("div"));
    row.append(make("span", "", name), meter, make("span", "muted"));
    place.append(row);
  }
  const [, meter, told] = row.children;
  const value = String(Math.round(100 * Math.min(1, share)));
  if (meter.getAttribute("aria-valuenow") !== value) {
    meter.setAttribute("aria-valuenow", value);
    meter.firstChild.style.width = `${value}%`;
  }
  setText(told, text);
}

function drawSpark(name, values) {
  const known = values.filter((value) => value !== null);
  setText(byId(name), known.length ? seconds(known[known.length - 1]) : "–");
  const svg = byId(`${name}-line`);
  let line = svg.firstElementChild;
  if (!line) { line = document.createElementNS(svg.namespaceURI, "polyline"); svg.append(line); }
  const top = Math.max(...known, 1e-9) * 1.15;
  const points = [];
  values.forEach((value, index) => {
    if (value === null) return;
    const x = 120 - (values.length - 1 - index) * (120 / (HISTORY_S - 1));
    points.push(`${x.toFixed(1)},${(29 - 28 * (value / top)).toFixed(1)}`);
    if (known.length === 1) points.push(`${(x - 0.5).toFixed(1)},${(29 - 28 * (value / top)).toFixed(1)}`);
  });
  line.setAttribute("points", points.join(" "));
}

// --- lanes -------------------------------------------------------------------------------------------------

const NO_WORK = 0, WAIT_PREV = 4, COMM = 5, FORWARD = 6, SAMPLE = 7, TAKE = 2, PUT = 8;
const CAUSES = {
  0: "no request to work on", 1: "waits for the engine core's plan", 3: "waits for a token to come back",
  4: "waits for the stage before", 5: "copies into or out of the link", 9: "waits for room behind it: the pipe is full",
};
const SHORT = { 0: "no work", 1: "waits for a plan", 3: "waits for a token", 5: "copies", 9: "pipe behind is full" };
const DOES = { 2: "prepares", 6: "computes", 7: "samples", 8: "sends results" };
const SHARE_MS = 5000, KEPT_MS = 12000, DRAW_MS = 50, SHARE_EVERY_MS = 500;

const lanes = new Map();   // by replica.stage.rank
let clockShift = null;     // page's milliseconds less the head's
let lag = 1500;            // milliseconds that the lanes are shown behind the head's time
let wantedLag = 1500;
let frozenAt = null;       // the head's time at the right edge while it stands still
let layout = "";
let colours = null;

function takeLanes(told) {
  const shift = performance.now() - told.now_ns / 1e6;
  clockShift = clockShift === null || Math.abs(shift - clockShift) > 1000 ? shift : Math.min(shift, clockShift + 0.05);
  for (const report of told.reports) {
    const key = `${report.replica}.${report.stage}.${report.rank}`;
    if (!lanes.has(key)) { lanes.set(key, newLane(report)); layout = ""; }
    addReport(lanes.get(key), report, told.now_ns);
  }
  if (feed.view) drawLaneFrames(feed.view);
}

function newLane(of) {
  return { replica: of.replica, stage: of.stage, rank: of.rank, segments: [], step: -1, tokens: 0, prompts: 0, endedAt: 0, shares: null, frame: null, cursor: null };
}

// A segment: [begin, end (milliseconds of the head), phase, step, tokens, tokens of prompts].
function addReport(lane, report, nowNs) {
  const phases = atob(report.phases);
  let at = (nowNs - report.age_ns) / 1e6;
  if (at < lane.endedAt - 1) at = Math.max(at, lane.endedAt);
  const gap = nowNs / 1e6 - (lane.endedAt || at);
  if (lane.endedAt && gap < 6000) wantedLag = Math.max(wantedLag, gap + 80);
  let next = 0;
  for (let index = 0; index < phases.length; index += 1) {
    while (next < report.steps.length && report.steps[next][0] === index) {
      [, lane.step, lane.tokens, lane.prompts] = report.steps[next];
      next += 1;
    }
    const end = at + report.durations_ns[index] / 1e6;
    const phase = phases.charCodeAt(index);
    const last = lane.segments[lane.segments.length - 1];
    if (last && last[2] === phase && last[3] === lane.step && at - last[1] < 0.01) last[1] = end;
    else if (end > at) lane.segments.push([at, end, phase, lane.step, lane.tokens, lane.prompts]);
    at = end;
  }
  lane.endedAt = at;
  let old = 0;
  while (old < lane.segments.length && lane.segments[old][1] < at - KEPT_MS) old += 1;
  if (old > 256 || old > lane.segments.length / 4) lane.segments.splice(0, old);
}

const headNow = () => performance.now() - clockShift;

// Lays the lanes out anew when stages, hosts or ranks have changed.
function drawLaneFrames(view) {
  const showsRanks = byId("ranks").checked;
  const hasRanks = view.replicas.some((replica) => replica.stages.some((stage) => (stage.num_ranks || 1) > 1));
  byId("ranks").parentElement.hidden = !hasRanks;
  const groups = [];
  for (const replica of view.replicas) {
    for (const stage of replica.stages) {
      const host = stage.host || "this host";
      const group = groups[groups.length - 1];
      const made = group && group.host === host && group.replica === replica.replica ? group : { host, replica: replica.replica, lanes: [], link: linkText(replica, stage) };
      if (made !== group) groups.push(made);
      for (let rank = 0; rank < (showsRanks ? stage.num_ranks || 1 : 1); rank += 1) made.lanes.push({ stage, rank });
    }
  }
  const wanted = JSON.stringify(groups.map((group) => [group.host, group.replica, group.lanes.map(({ stage, rank }) => [stage.stage, rank, stage.layers, stage.num_ranks])]));
  if (wanted !== layout) { layout = wanted; layOut(groups, view.replicas.length > 1, showsRanks); }
  groups.forEach((group, index) => {
    const link = byId("lanes").children[index].querySelector(".link");
    if (link) setText(link, group.link);
  });
  for (const replica of view.replicas) {
    for (const stage of replica.stages) {
      for (const lane of lanes.values()) {
        if (lane.replica !== replica.replica || lane.stage !== stage.stage || !lane.frame) continue;
        const isLost = !replica.ready && (replica.failed_stage === null || replica.failed_stage === stage.stage);
        const state = isLost ? "lost" : replica.ready ? "ready" : "waiting";
        if (lane.frame.box.dataset.state !== state) lane.frame.box.dataset.state = state;
      }
    }
  }
}

function linkText(replica, stage) {
  const index = replica.stages.indexOf(stage);
  const before = index > 0 ? replica.stages[index - 1].host : null;
  if (!before || before === stage.host) return "";
  const link = replica.links.find((each) => each.hosts.includes(before) && each.hosts.includes(stage.host));
  if (!link) return `from ${before}`;
  const isFirst = link.hosts[0] === before;
  const speed = isFirst ? link.bytes_per_s_out : link.bytes_per_s_in;
  const slow = isFirst ? link.reduced_bytes_per_s_out : link.reduced_bytes_per_s_in;
  const now = slow ? `, slow now: ${bytes(slow)}/s` : "";
  return `link from ${before}: ${bytes(speed)}/s, round trip ${seconds(link.round_trip_s)}${now}`;
}

function layOut(groups, hasReplicas, showsRanks) {
  const place = byId("lanes");
  place.replaceChildren();
  const count = groups.reduce((sum, group) => sum + group.lanes.length, 0);
  place.dataset.size = count <= 4 ? "tall" : count <= 12 ? "middle" : "low";
  for (const lane of lanes.values()) lane.frame = null;
  for (const group of groups) {
    const box = make("div", "host");
    const title = make("h3", "", hasReplicas ? `Replica ${group.replica}, ${group.host}` : group.host);
    title.append(make("span", "link"));
    box.append(title);
    for (const { stage, rank } of group.lanes) {
      const key = `${group.replica}.${stage.stage}.${rank}`;
      if (!lanes.has(key)) lanes.set(key, newLane({ replica: group.replica, stage: stage.stage, rank }));
      const lane = lanes.get(key);
      lane.frame = laneFrame(lane, stage, showsRanks && (stage.num_ranks || 1) > 1);
      box.append(lane.frame.box);
    }
    place.append(box);
  }
}

function laneFrame(lane, stage, namesRank) {
  const box = make("div", "lane");
  const title = make("div", "title", namesRank ? `Stage ${lane.stage} tp ${lane.rank}` : `Stage ${lane.stage}`);
  const layers = stage.layers ? `layers ${stage.layers[0]}–${stage.layers[1] - 1}` : "";
  title.append(make("small", "", (stage.num_ranks || 1) > 1 && !namesRank ? `${layers}, ${stage.num_ranks} ranks` : layers));
  const canvas = make("canvas");
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "slider");
  canvas.setAttribute("aria-label", `${title.firstChild.textContent}, ${layers}: what it did when; arrow keys go through it`);
  canvas.setAttribute("aria-valuemin", "-5");
  canvas.setAttribute("aria-valuemax", "0");
  canvas.setAttribute("aria-valuenow", "0");
  canvas.setAttribute("aria-valuetext", "now");
  const share = make("div", "share");
  share.append(make("span", "", "–"), make("small"));
  box.append(title, canvas, share);
  canvas.addEventListener("pointermove", (event) => point(lane, event));
  canvas.addEventListener("pointerleave", () => { if (document.activeElement !== canvas) hideTip(); });
  canvas.addEventListener("keydown", (event) => step(lane, event));
  canvas.addEventListener("blur", () => { lane.cursor = null; hideTip(); });
  return { box, canvas, share, context: canvas.getContext("2d") };
}

const windowMs = () => Number(byId("window").value);

function edge() {  // the head's time at the right edge
  if (frozenAt !== null) return frozenAt;
  const live = headNow() - lag;
  return windowMs() < 5000 ? Math.floor(live / 1000) * 1000 : live;  // a fast one would be a blur
}

function segmentAt(lane, at) {
  let [low, high] = [0, lane.segments.length - 1];
  while (low <= high) {
    const middle = (low + high) >> 1;
    const [begin, end] = lane.segments[middle];
    if (at < begin) high = middle - 1;
    else if (at >= end) low = middle + 1;
    else return middle;
  }
  return -1;
}

function shortCause(lane, phase) {
  return phase === WAIT_PREV ? `waits for stage ${lane.stage - 1}` : SHORT[phase];
}

function describe(lane, segment) {
  const [begin, end, phase, stepId, tokens, prompts] = segment;
  const took = seconds((end - begin) / 1000);
  const isBubble = phase in CAUSES && phase !== COMM;
  if (isBubble) return `Bubble of ${took}: ${CAUSES[phase]}.`;
  const step = stepId < 0 ? "" : ` step ${stepId}`;
  if (phase === COMM) {
    const size = tokens * (feed.view ? feed.view.token_bytes : 0);
    const rate = size && end > begin ? `, ${bytes(size)}: ${bytes(size / ((end - begin) / 1000))}/s` : "";
    return `Transfer of${step}: ${took}${rate}.`;
  }
  const what = prompts ? `prefill, ${plural(prompts, "token")} of prompts${tokens > prompts ? ` and ${tokens - prompts} decoding` : ""}` : `decode, ${plural(tokens, "token")}`;
  return `${DOES[phase] || "works on"}${step} (${tokens ? what : "a probe"}): ${took}.`;
}

function point(lane, event) {
  const box = lane.frame.canvas.getBoundingClientRect();
  const at = edge() - windowMs() * (1 - (event.clientX - box.left) / box.width);
  const index = segmentAt(lane, at);
  showTip(index < 0 ? "Not reported." : describe(lane, lane.segments[index]), event.clientX, box.bottom);
}

function step(lane, event) {
  const moves = { ArrowLeft: -1, ArrowRight: 1, Home: "first", End: "last" };
  if (event.key === "Escape") { freeze(false); lane.cursor = null; hideTip(); return; }
  if (!(event.key in moves)) return;
  event.preventDefault();
  if (frozenAt === null) freeze(true);
  const from = edge() - windowMs();
  let index = lane.cursor === null ? segmentAt(lane, edge() - 1) : segmentAt(lane, lane.cursor) + (Number(moves[event.key]) || 0);
  if (lane.cursor === null && index < 0) index = lane.segments.length - 1;
  while (index > 0 && lane.segments[index] && lane.segments[index][0] >= edge()) index -= 1;
  if (event.key === "Home") index = lane.segments.findIndex((segment) => segment[1] > from);
  if (event.key === "End") index = segmentAt(lane, edge() - 1);
  const segment = lane.segments[index];
  if (!segment || segment[1] <= from) return;
  lane.cursor = (segment[0] + segment[1]) / 2;
  const { canvas } = lane.frame;
  const text = describe(lane, segment);
  canvas.setAttribute("aria-valuenow", ((lane.cursor - edge()) / 1000).toFixed(3));
  canvas.setAttribute("aria-valuetext", text);
  const box = canvas.getBoundingClientRect();
  showTip(text, box.left + box.width * Math.max(0, 1 - (edge() - lane.cursor) / windowMs()), box.bottom);
}

function showTip(text, x, y) {
  const tip = byId("tip");
  setText(tip, text);
  tip.hidden = false;
  tip.style.left = `${Math.max(8, Math.min(x + 10, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${Math.min(y + 8, innerHeight - tip.offsetHeight - 8)}px`;
}

function hideTip() { byId("tip").hidden = true; }

function freeze(isFrozen) {
  frozenAt = isFrozen && clockShift !== null ? edge() : null;
  byId("pause").setAttribute("aria-pressed", String(isFrozen));
  setText(byId("pause"), isFrozen ? "Go on" : "Pause");
}

// Colours and patterns, from the style sheet; made anew when the scheme changes.
function palette(context, ratio) {
  const style = getComputedStyle(document.documentElement);
  const value = (name) => style.getPropertyValue(`--${name}`).trim();
  const solid = [0, 1, 2, 3, 4, 5].map((index) => value(`batch${index}`));
  const hatched = solid.map((colour) => {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6 * ratio;
    const pen = tile.getContext("2d");
    pen.scale(ratio, ratio);
    pen.fillStyle = value("panel");
    pen.fillRect(0, 0, 6, 6);
    pen.strokeStyle = colour;
    pen.lineWidth = 2.4;
    pen.beginPath();
    for (const shift of [-6, 0, 6]) { pen.moveTo(shift - 1, 7); pen.lineTo(shift + 7, -1); }
    pen.stroke();
    return context.createPattern(tile, "repeat");
  });
  return { solid, hatched, ratio, wait: value("wait"), over: value("over"), comm: value("comm"), muted: value("muted"), text: value("text") };
}

function batchColour(lane, segment) {
  const replica = feed.view && feed.view.replicas[lane.replica];
  const groups = replica && replica.micro_batches ? Math.max(replica.micro_batches, 2) : 6;
  return (((segment[3] % groups) + groups) % groups) % 6;
}

function drawLane(lane) {
  const { canvas, context } = lane.frame;
  const ratio = devicePixelRatio || 1;
  const [width, height] = [Math.round(canvas.clientWidth * ratio), Math.round(canvas.clientHeight * ratio)];
  if (!width) return;
  if (canvas.width !== width || canvas.height !== height) { canvas.width = width; canvas.height = height; }
  if (!colours || colours.ratio !== ratio) colours = palette(context, ratio);
  context.clearRect(0, 0, width, height);
  const right = edge();
  const left = right - windowMs();
  const scale = width / (right - left);
  const [top, tall, strip] = [3 * ratio, height - 12 * ratio, height - 6 * ratio];
  let index = Math.max(0, lowerBound(lane.segments, left));
  let column = -1, longest = 0;
  for (; index < lane.segments.length && lane.segments[index][0] < right; index += 1) {
    const segment = lane.segments[index];
    const phase = segment[2];
    const x = (segment[0] - left) * scale;
    const wide = (segment[1] - segment[0]) * scale;
    if (wide < 0.6) {  // of several in one column of pixels the longest is seen
      if (Math.floor(x) === column && wide <= longest) continue;
      column = Math.floor(x);
      longest = wide;
    }
    const drawn = Math.max(wide, 1);
    if (phase === FORWARD || phase === SAMPLE) {
      if (!segment[4]) continue;  // a probe
      const colour = batchColour(lane, segment);
      context.fillStyle = segment[5] ? colours.hatched[colour] : colours.solid[colour];
      context.fillRect(x, top, drawn, tall);
      if (segment[5] && wide > 3) { context.strokeStyle = colours.solid[colour]; context.lineWidth = ratio; context.strokeRect(x + 0.5, top + 0.5, drawn - 1, tall - 1); }
    } else if (phase === COMM) {
      context.fillStyle = colours.comm;
      context.fillRect(x, strip, Math.max(drawn, ratio), 3 * ratio);
    } else if (phase === TAKE || phase === PUT) {
      context.fillStyle = colours.over;
      context.fillRect(x, top + tall / 3, drawn, tall / 3);
    } else if (phase !== NO_WORK) {
      context.fillStyle = colours.wait;
      context.fillRect(x, top, drawn, tall);
      if (wide > 90 * ratio) label(context, shortCause(lane, phase), x, top + tall / 2, wide, ratio);
    } else if (wide > 90 * ratio) {
      label(context, SHORT[NO_WORK], x, top + tall / 2, wide, ratio);
    }
  }
  if (lane.cursor !== null) {
    context.fillStyle = colours.text;
    context.fillRect((lane.cursor - left) * scale - ratio, 0, 2 * ratio, height);
  }
}

function lowerBound(segments, at) {  // the first that ends behind `at`
  let [low, high] = [0, segments.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (segments[middle][1] <= at) low = middle + 1; else high = middle;
  }
  return low;
}

function label(context, text, x, y, wide, ratio) {
  const begin = Math.max(x, 0);
  const end = Math.min(x + wide, context.canvas.width);
  if (end - begin < 90 * ratio) return;
  context.fillStyle = colours.muted;
  context.font = `${11 * ratio}px system-ui, sans-serif`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText(text, (begin + end) / 2, y, end - begin - 8 * ratio);
}

function measure(lane, right) {
  const left = right - SHARE_MS;
  const spent = new Array(10).fill(0);
  let [moved, transfer, last] = [0, 0, -1];
  for (let index = lowerBound(lane.segments, left); index < lane.segments.length; index += 1) {
    const [begin, end, phase, stepId, tokens] = lane.segments[index];
    if (begin >= right) break;
    const inside = Math.min(end, right) - Math.max(begin, left);
    spent[phase] += inside;
    if (phase === COMM) transfer += inside;
    if (phase === FORWARD && stepId !== last) { moved += tokens; last = stepId; }
  }
  const all = spent.reduce((sum, each) => sum + each, 0);
  if (all < 300) return null;
  const shares = spent.map((each) => each / all);
  const bubbles = [0, 1, 3, 4, 5, 9].map((phase) => [shares[phase], phase]).sort((one, other) => other[0] - one[0]);
  return { shares, computing: shares[FORWARD] + shares[SAMPLE], bubble: bubbles.reduce((sum, [share, phase]) => sum + (phase === NO_WORK ? 0 : share), 0), bubbles, worst: bubbles[0], tokens: moved / (all / 1000) };
}

let drawnAt = 0, sharesAt = 0;
const isStill = matchMedia("(prefers-reduced-motion: reduce)");

function animate(now) {
  requestAnimationFrame(animate);
  if (clockShift === null || now - drawnAt < (isStill.matches ? 1000 : DRAW_MS)) return;
  drawnAt = now;
  lag += (wantedLag - lag) * 0.05;
  for (const lane of lanes.values()) if (lane.frame) drawLane(lane);
  if (now - sharesAt > SHARE_EVERY_MS) {
    sharesAt = now;
    wantedLag = Math.max(1300, wantedLag * 0.97);
    drawShares();
  }
}

function drawShares() {
  const right = headNow() - lag;
  let [sum, count] = [0, 0];
  for (const lane of lanes.values()) {
    lane.shares = measure(lane, right);
    if (!lane.frame) continue;
    const [figure, cause] = lane.frame.share.children;
    if (!lane.shares) { setText(figure, "no report"); setText(cause, ""); continue; }
    sum += lane.shares.bubble;
    count += 1;
    setText(figure, `${percent(lane.shares.computing)} computing`);
    const [share, phase] = lane.shares.worst;
    const out = feed.view && feed.view.token_bytes && !isLast(lane) && lane.shares.tokens > 0.5 ? `sends ${bytes(lane.shares.tokens * feed.view.token_bytes)}/s` : "";
    setText(cause, share > 0.03 ? `${percent(share)} ${shortCause(lane, phase)}` : out);
    const causes = lane.shares.bubbles.filter(([part]) => part > 0.005).map(([part, of]) => `${percent(part)} ${shortCause(lane, of)}`);
    lane.frame.share.title = [...causes, out].filter(Boolean).join("\n");
  }
  setText(byId("bubble"), count ? percent(sum / count) : "–");
  if (feed.view) explain(feed.view);
}

function isLast(lane) {
  const replica = feed.view.replicas[lane.replica];
  return !replica || lane.stage === replica.stages.length - 1;
}

// --- why the pipe is slow ----------------------------------------------------------------------------------

function explain(view) {
  const texts = view.replicas.map((replica) => reasonOf(replica));
  const worst = texts.find(([state]) => state === "lost") || texts.find(([state]) => state === "slow") || texts[0];
  const place = byId("why");
  place.dataset.state = worst[0];
  setText(place, (view.replicas.length > 1 ? `Replica ${texts.indexOf(worst)}: ` : "") + worst[1]);
}

function reasonOf(replica) {
  if (!replica.ready) return ["lost", `Not ready: ${replica.reason || "starting"}`];
  if (replica.paused) return ["slow", "An administrator has paused the engine."];
  const own = [...lanes.values()].filter((lane) => lane.replica === replica.replica && lane.rank === 0 && lane.shares).sort((one, other) => one.stage - other.stage);
  if (!own.length) return ["", "Waiting for the first report of the stages."];
  const mean = (phase) => own.reduce((sum, lane) => sum + lane.shares.shares[phase], 0) / own.length;
  if (mean(NO_WORK) > 0.7) return ["", replica.running ? "Hardly any work: the stages wait for requests." : "Idle: no request runs."];
  const most = own.reduce((one, other) => (other.shares.computing > one.shares.computing ? other : one));
  const others = own.filter((lane) => lane !== most);
  const rest = others.length ? others.reduce((sum, lane) => sum + lane.shares.computing, 0) / others.length : 0;
  if (others.length && most.shares.computing > 0.4 && most.shares.computing - rest > 0.2 && replica.running > 1) return ["slow", slowStage(replica, most, others)];
  const copying = own.find((lane) => lane.shares.shares[COMM] > 0.15);
  if (copying) return ["slow", `Stage ${copying.stage} spends ${percent(copying.shares.shares[COMM])} of its time copying into or out of a link: the link is slow.`];
  if (!replica.running) return ["", "No request runs now."];
  if (replica.running < own.length && own.length > 1) {
    return ["", `${plural(replica.running, "request")} for ${plural(own.length, "stage")}: one request is in one stage at a time, so the others wait. More requests at once fill the pipe.`];
  }
  const hungry = own.find((lane) => lane.stage > 0 && lane.shares.shares[4] > 0.3 && own[lane.stage - 1] && own[lane.stage - 1].shares.computing < 0.5);
  if (hungry) return ["slow", `Stage ${hungry.stage} waits ${percent(hungry.shares.shares[4])} of its time for stage ${hungry.stage - 1}, which computes only ${percent(own[hungry.stage - 1].shares.computing)}: the way between them takes long.`];
  if (mean(1) > 0.25) return ["slow", `The stages wait ${percent(mean(1))} of their time for plans: the engine core does not keep up.`];
  if (mean(3) > 0.25) return ["slow", `The stages wait ${percent(mean(3))} of their time for tokens to come back: there are too few micro-batches in flight.`];
  return ["", `The pipe is full: its stages compute ${percent(own.reduce((sum, lane) => sum + lane.shares.computing, 0) / own.length)} of the time.`];
}

function slowStage(replica, most, others) {
  const waiting = others.reduce((one, other) => (other.shares.worst[0] > one.shares.worst[0] ? other : one));
  let text = `Stage ${most.stage} is the slowest: its steps take ${percent(most.shares.computing)} of the time, and stage ${waiting.stage} waits for it (all its waits together: ${percent(waiting.shares.bubble)}).`;
  const stage = replica.stages.find((each) => each.stage === most.stage);
  if (stage && stage.busy_ratio < 0.6 * most.shares.computing) {
    text += ` In only ${percent(stage.busy_ratio)} of the time a processor works for it: it is throttled, or shares its cores.`;
  } else {
    text += " Fewer layers there, or a faster device, would help most.";
  }
  return text;
}

// --- events ------------------------------------------------------------------------------------------------

const MAX_EVENTS = 60;

function note(kind, text) {
  const line = make("li");
  line.dataset.kind = kind;
  const at = new Date();
  const time = make("time", "", at.toLocaleTimeString("en-GB"));
  time.dateTime = at.toISOString();
  line.append(time, text);
  const list = byId("events");
  list.prepend(line);
  while (list.children.length > MAX_EVENTS) list.lastChild.remove();
  return line;
}

const downSince = new Map();

function compare(old, view) {
  if (!old) return;
  if (view.draining && !old.draining) note("lost", "The server shuts down.");
  view.replicas.forEach((replica, index) => {
    const before = old.replicas[index];
    if (!before) { note("good", `Replica ${index} has joined.`); return; }
    const who = view.replicas.length > 1 ? `Replica ${index}: ` : "";
    if (before.ready && !replica.ready) {
      downSince.set(index, view.time);
      note("lost", `${who}${replica.reason || "Not ready"}`);
    }
    compareStages(before, replica, who);
    if (replica.core_restarts > before.core_restarts) note("lost", `${who}The engine core was lost and started again.`);
    if (replica.epoch !== null && before.epoch !== null && replica.epoch > before.epoch) note("", `${who}Epoch ${replica.epoch} has begun.`);
    if (replica.recovered_requests > before.recovered_requests) note("good", `${who}${plural(replica.recovered_requests - before.recovered_requests, "request")} go on after the loss.`);
    if (!before.ready && replica.ready) {
      const since = downSince.get(index);
      note("good", `${who}Ready${since ? ` again after ${(view.time - since).toFixed(1)} s` : ""}.`);
    }
    if (replica.paused !== null && before.paused !== null && replica.paused !== before.paused) note("", `${who}${replica.paused ? "Paused" : "Goes on"}, by an administrator.`);
    compareDrafts(before.drafts, replica.drafts, who);
  });
}

function compareStages(before, replica, who) {
  const known = new Set(before.stages.map((stage) => stage.host));
  for (const stage of replica.stages) {
    const was = before.stages.find((each) => each.stage === stage.stage);
    if (!was) continue;
    if (stage.restarts > was.restarts) note("lost", `${who}Stage ${stage.stage} was lost and started again.`);
    if (was.host && stage.host && was.host !== stage.host) {
      if (!known.has(stage.host)) { known.add(stage.host); note("good", `${who}Host ${stage.host} has joined the pipe.`); }
      note("", `${who}Stage ${stage.stage} has moved from ${was.host} to ${stage.host}.`);
    }
  }
}

const draftsSince = { accepted: 0, cancelled: 0, line: null };

function compareDrafts(before, drafts, who) {  // one line until something else happens
  if (!before || !drafts || !drafts.drafter) return;
  const accepted = Math.max(0, drafts.accepted - before.accepted);
  const cancelled = Math.max(0, drafts.cancelled - before.cancelled);
  if (!(accepted || cancelled)) return;
  if (draftsSince.line !== byId("events").firstChild) Object.assign(draftsSince, { accepted: 0, cancelled: 0, line: note("", " ") });
  draftsSince.accepted += accepted;
  draftsSince.cancelled += cancelled;
  setText(draftsSince.line.lastChild, `${who}${plural(draftsSince.accepted, "draft")} accepted and ${draftsSince.cancelled.toLocaleString("en")} cancelled from then on.`);
}

// --- the rest ----------------------------------------------------------------------------------------------

async function downloadTrace() {
  const button = byId("trace");
  button.disabled = true;
  try {
    const answer = await ask("debug/trace");
    const link = make("a");
    link.href = URL.createObjectURL(await answer.blob());
    link.download = `penstock-trace-${new Date().toISOString().slice(0, 19).replace(/:/g, "-")}.json`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    note("", "A trace of the last ten seconds was saved; Perfetto opens it.");
  } catch (error) {
    note("lost", `No trace: ${error.message}`);
  } finally {
    button.disabled = false;
  }
}

async function readSettings() {
  try {
    const info = await (await ask("server_info")).json();
    hostBytes = Number(info.settings["kv-host-bytes"]) || 0;
    byId("limit").max = String(info.max_model_len);
  } catch { /* bars without an end */ }
}

function setUp() {
  setUpKey();
  setUpChat();
  byId("trace").addEventListener("click", downloadTrace);
  byId("pause").addEventListener("click", () => freeze(frozenAt === null));
  byId("window").addEventListener("change", () => { if (frozenAt !== null) freeze(true); });
  byId("ranks").addEventListener("change", () => { if (feed.view) drawLaneFrames(feed.view); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { colours = null; });
  document.addEventListener("visibilitychange", () => feed.restart());
  requestAnimationFrame(animate);
  feed.run();
  readSettings();
}

setUp();
