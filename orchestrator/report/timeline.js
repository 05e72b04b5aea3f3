// When each slot had a rollout, and what that waited for; and the time line of one rollout.

const LANE = 9;  // CSS pixels
const MOST_LANES = 160;
const OUTSIDE = 2;  // of the kinds of waits: a request to the outside
const GAP = 0.05;  // seconds: a slot is given on at once
const PHASES = [["sampling", "waits for a completion"], ["tool", "waits for a tool"], ["outside", "asks the outside"],
  ["code", "the agent and its code"],
  ["launch", "its sandbox starts"], ["idle", "no rollout"]];
const span = { from: null, to: null };  // what is shown, in seconds since the first start; null: to the end of it

// Rollouts in lanes, as many as ran at a time; those of one node stay together. What was only graded again, from its
// record, had no slot of its own.
function lanesOf(rollouts) {
  const timed = rollouts.filter((r) => r.counts && r.started_at !== null && r.duration_s !== null);
  const launched = (r) => r.started_at - (r.launch_s || 0);
  const start = timed.reduce((least, r) => Math.min(least, launched(r)), Infinity);
  const byNode = new Map();
  for (const rollout of timed.sort((a, b) => launched(a) - launched(b))) {
    if (!byNode.has(rollout.node)) byNode.set(rollout.node, []);
    const lanes = byNode.get(rollout.node);
    const from = rollout.started_at - start;
    const begins = launched(rollout) - start;  // a slot is taken while its sandbox starts, too
    const idle = lanes.length && lanes[0].until <= begins + GAP;  // the first one is idle for longest
    const lane = idle ? lanes.shift() : { node: rollout.node, until: 0, bars: [] };
    const launch = Math.max(lane.until, begins);
    lane.bars.push({ rollout, launch, from, to: from + rollout.duration_s });
    lane.until = from + rollout.duration_s;
    let [low, high] = [0, lanes.length];  // lanes stay in the order in which they become idle
    while (low < high) {
      const middle = (low + high) >> 1;
      if (lanes[middle].until < lane.until) low = middle + 1;
      else high = middle;
    }
    lanes.splice(low, 0, lane);
  }
  const lanes = [...byNode.values()].flat().sort((a, b) => (a.node < b.node ? -1 : a.node > b.node ? 1 : a.bars[0].from - b.bars[0].from));
  return { lanes, length: lanes.reduce((most, lane) => Math.max(most, lane.until), 0) };
}

// Calls back with (phase, from, to) for each part of a bar, in order.
function phases(bar, told) {
  let at = bar.from;
  if (bar.launch < bar.from) told("launch", bar.launch, bar.from);
  for (const [kind, begin, end] of bar.rollout.waits.filter(([kind]) => kind < OUTSIDE)) {
    const [from, to] = [Math.max(at, bar.from + begin / 100), Math.min(bar.to, bar.from + end / 100)];
    if (from > at) ownTime(bar, told, at, from);
    if (to > from) told(kind ? "tool" : "sampling", from, to);
    at = Math.max(at, to);
  }
  if (bar.to > at) ownTime(bar, told, at, bar.to);
}

// Of the time of the agent and its code: when it asked something of the outside.
function ownTime(bar, told, from, to) {
  for (const [kind, begin, end] of bar.rollout.waits) {
    const [asked, got] = [Math.max(from, bar.from + begin / 100), Math.min(to, bar.from + end / 100)];
    if (kind !== OUTSIDE || got <= asked) continue;
    if (asked > from) told("code", from, asked);
    told("outside", asked, got);
    from = got;
  }
  if (to > from) told("code", from, to);
}

function shares(lanes, length) {
  const sums = { sampling: 0, tool: 0, outside: 0, code: 0, launch: 0 };
  for (const lane of lanes) for (const bar of lane.bars) phases(bar, (phase, from, to) => { sums[phase] += to - from; });
  const all = lanes.length * length;
  sums.idle = Math.max(0, all - Object.values(sums).reduce((sum, part) => sum + part, 0));
  return PHASES.filter(([phase]) => phase !== "outside" || sums.outside).map(([phase, label]) => [phase, label, all ? sums[phase] / all : 0]);
}

function timelinePanel() {
  const { lanes, length } = lanesOf(run.rollouts);
  if (!lanes.length || !length) return null;
  const shown_ = lanes.slice(0, MOST_LANES);
  const canvas = el("canvas", "slots");
  canvas.setAttribute("role", "application");  // it takes the arrow keys
  canvas.tabIndex = 0;
  const height = shown_.length * LANE + 18;
  canvas.style.height = `${height}px`;  // once: whoever changes a size while it is observed is told of a loop
  const told = el("p", "told");
  told.setAttribute("aria-live", "polite");
  const hint = "Drag over a part to see it larger; click a rollout to open it. By keys: arrows, + and −, Enter.";
  const legend = el("p", "legend", ...shares(lanes, length).flatMap(([phase, label, share]) =>
    [el("i", `phase-${phase}`), el("span", "", `${label} ${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %`)]));
  const back = button("The whole run", () => { span.from = span.to = null; draw(); });
  const edges = () => [span.from === null ? 0 : span.from, span.to === null ? length : span.to];
  const parts = [...legend.querySelectorAll("span")].map((part) => part.textContent).join(", ");
  canvas.setAttribute("aria-label", `${counted(lanes.length, "slot")} over ${seconds(length)}: ${parts}`);

  function draw(selected) {
    const scale = devicePixelRatio || 1;
    const width = canvas.clientWidth || 1180;
    canvas.width = width * scale;
    canvas.height = height * scale;
    const pen = canvas.getContext("2d");
    const style = getComputedStyle(canvas);
    const colour = Object.fromEntries(PHASES.map(([phase]) => [phase, style.getPropertyValue(`--${phase}`)]));
    const [from, to] = edges();
    const x = (t) => ((t - from) / (to - from)) * width;
    pen.scale(scale, scale);
    shown_.forEach((lane, place) => {
      const y = place * LANE;
      pen.fillStyle = colour.idle;
      pen.fillRect(0, y, width, LANE - 1);
      for (const bar of lane.bars) {
        if (bar.to < from || bar.launch > to) continue;
        phases(bar, (phase, begin, end) => {
          pen.fillStyle = colour[phase];
          pen.fillRect(x(begin), y, Math.max(0.5, x(end) - x(begin)), LANE - 1);
        });
        pen.fillStyle = style.color;
        pen.fillRect(x(bar.from), y, 0.6, LANE - 1);
        if (kindOf(bar.rollout.outcome) === "failed") {
          pen.fillStyle = style.getPropertyValue("--broken");
          pen.fillRect(x(bar.from), y + LANE - 3, Math.max(1, x(bar.to) - x(bar.from)), 2);
        }
      }
    });
    pen.fillStyle = style.getPropertyValue("--faint");
    pen.font = "11px sans-serif";
    for (let tick = 0; tick <= 4; tick += 1) {
      pen.textAlign = tick === 0 ? "left" : tick === 4 ? "right" : "center";
      pen.fillText(seconds(from + ((to - from) * tick) / 4), (width * tick) / 4, height - 4);
    }
    if (picked) {
      const bar = shown_[picked.lane].bars[picked.bar];
      pen.strokeStyle = style.getPropertyValue("--ink");
      pen.lineWidth = 2;
      pen.strokeRect(x(bar.launch), picked.lane * LANE, Math.max(3, x(bar.to) - x(bar.launch)), LANE - 1);
    }
    if (selected) {
      pen.fillStyle = style.getPropertyValue("--chosen");
      pen.fillRect(Math.min(...selected), 0, Math.abs(selected[1] - selected[0]), height - 18);
    }
    back.hidden = span.from === null;
  }

  function under(event) {
    const [from, to] = edges();
    const at = from + (event.offsetX / canvas.clientWidth) * (to - from);
    const lane = shown_[Math.floor(event.offsetY / LANE)];
    return [lane, at, lane && lane.bars.find((bar) => bar.launch <= at && at <= bar.to)];
  }

  // Arrow keys pick a rollout, + and − show less or more around it.
  let picked = null;
  canvas.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    const within = (place, list) => Math.max(0, Math.min(list.length - 1, place));
    if (event.key in moves) {
      const [down, right] = picked === null ? [0, 0] : moves[event.key];
      const lane = within((picked ? picked.lane : 0) + down, shown_);
      picked = { lane, bar: within((picked ? picked.bar : 0) + right, shown_[lane].bars) };
    } else if (picked && "+-−".includes(event.key)) {
      const { launch, to } = shown_[picked.lane].bars[picked.bar];
      const reach = (edges()[1] - edges()[0]) * (event.key === "+" ? 0.25 : 1);
      [span.from, span.to] = [Math.max(0, (launch + to) / 2 - reach), Math.min(length, (launch + to) / 2 + reach)];
    } else if (picked && event.key === "Enter") {
      location.hash = rolloutHash(shown_[picked.lane].bars[picked.bar].rollout);
      return;
    } else {
      return;
    }
    event.preventDefault();
    const { rollout, from, to } = shown_[picked.lane].bars[picked.bar];
    told.textContent = plain([rollout.id, rollout.outcome, `${seconds(from)} to ${seconds(to)}`].join(" · "));
    draw();
  });
  canvas.addEventListener("blur", () => { picked = null; draw(); });

  let began = null;
  canvas.addEventListener("pointerdown", (event) => { began = event.offsetX; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    const [lane, at, bar] = under(event);
    let phase = "idle";
    if (bar) phases(bar, (name, from, to) => { if (from <= at && at <= to) phase = name; });
    told.textContent = !lane ? hint : plain([seconds(at), lane.node && `node ${lane.node}`, bar ? bar.rollout.id : null,
      bar ? bar.rollout.outcome : null, PHASES.find(([name]) => name === phase)[1]].filter(Boolean).join(" · "));
    if (began !== null) draw([began, event.offsetX]);
  });
  canvas.addEventListener("pointerup", (event) => {
    const [from, to] = edges();
    const ends = [began === null ? event.offsetX : began, event.offsetX].sort((a, b) => a - b)
      .map((at) => from + (Math.max(0, Math.min(canvas.clientWidth, at)) / canvas.clientWidth) * (to - from));
    const dragged = began !== null && Math.abs(event.offsetX - began) > 4;
    began = null;
    if (dragged) [span.from, span.to] = ends;
    draw();
    const bar = under(event)[2];
    if (!dragged && bar) location.hash = rolloutHash(bar.rollout);
  });
  canvas.addEventListener("pointerleave", () => { told.textContent = hint; });
  told.textContent = hint;
  new ResizeObserver(() => requestAnimationFrame(() => draw())).observe(canvas);
  const more = lanes.length - shown_.length;
  return el("section", "panel wide", el("h2", "", "Slots over time",
    el("small", "", `${counted(lanes.length, "slot")} in use at most${more > 0 ? `, ${shown_.length} of them shown` : ""}`)),
  legend, canvas, el("div", "below", told, back));
}

// One rollout, in seconds since its assignment: what it waited for, what it asked, and what ran beside it. Null: it
// had nothing but completions.
function courseOf(rollout, details) {
  const { completions, tool_calls: calls, services, requests: { shown: requests } } = details;
  if (!calls.length && !requests.length && !services.length) return null;
  const end = Math.max(rollout.duration_s || 0, ...known([...completions, ...calls, ...requests].map((one) => one.ended_s)));
  // All services are there when it begins; they were asked for before.
  const lead = Math.max(0, ...services.map((one) => (one.started_s || 0) + (one.healthy_s || 0)));
  const start = -Math.max(lead, rollout.launch_s || 0);
  if (end <= start) return null;
  const told = el("p", "told", "Point at a bar to see what it was; click to see its turn.");
  const grid = el("div", "course");

  // `bars`: (class, from, to, what it was, its turn).
  function lane(name, summary, bars) {
    const track = el("div", "lane");
    track.setAttribute("role", "img");
    track.setAttribute("aria-label", plain(`${name}: ${summary}`));
    for (const [kind, from, to, what, turn] of bars) {
      const [left, right] = [from, to].map((at) => (Math.max(start, Math.min(end, at)) - start) / (end - start));
      const bar = titled(el("i", kind), what);
      bar.style.setProperty("--from", left);
      bar.style.setProperty("--for", Math.max(0, right - left));
      bar.addEventListener("pointerenter", () => { told.textContent = plain(what); });
      if (turn) bar.addEventListener("click", () => { location.hash = `${rolloutHash(rollout)}/${turn}`; });
      track.append(bar);
    }
    grid.append(el("span", "name", shown(name)), track);
  }

  const turnOf = (one) => completions.length ? askedBy(one, completions) + 1 : 0;
  const timed = (all) => all.filter((one) => took(one) !== null && took(one) >= 0);
  const when = (one) => `${seconds(one.started_s)}, for ${seconds(took(one))}`;
  lane("completions", whole(completions.length), timed(completions).map((one) =>
    ["phase-sampling", one.started_s, one.ended_s, `${counted(one.tokens, "token")} at ${when(one)}`, completions.indexOf(one) + 1]));
  for (const name of new Set(calls.map(toolKind))) {
    const some = calls.filter((call) => toolKind(call) === name);
    lane(name, whole(some.length), timed(some).map((one) =>
      [one.error === null ? "phase-tool" : "bad", one.started_s, one.ended_s, `${one.name}${one.error === null ? "" : ", an error,"} at ${when(one)}`, turnOf(one)]));
  }
  if (requests.length) {
    const refused = (one) => Number(Boolean(one.refusal));
    lane("requests", `${whole(details.requests.count)}, ${whole(details.requests.refused)} refused`, timed(requests).sort((a, b) => refused(a) - refused(b)).map((one) =>
      [one.refusal ? "bad" : "phase-outside", one.started_s, one.ended_s, `${one.method} ${shortened(one.url)}, ${statusOf(one)}, at ${when(one)}`, turnOf(one)]));
  }
  for (const one of services) {
    const begun = (one.started_s || 0) - lead;
    const healthy = one.healthy_s === null ? end : begun + one.healthy_s;  // whoever ended by itself ended the rollout
    const how = one.ended || (one.healthy_s === null ? "was never there" : `there after ${seconds(one.healthy_s)}`);
    lane(one.name, how, [["phase-launch", begun, healthy, `${one.name} starts`, 0],
      ["phase-code", healthy, end, `${one.name}: ${how}`, 0], ...(one.ended ? [["bad", end, end, `${one.name}: ${how}`, 0]] : [])]);
  }
  grid.append(el("span"), el("div", "ticks", ...[0, 1, 2, 3, 4].map((tick) => el("span", "", seconds(start + ((end - start) * tick) / 4)))));
  return el("section", "panel wide", el("h2", "", "Time line", el("small", "", "since its assignment; what failed or was refused is red")), grid, told);
}
