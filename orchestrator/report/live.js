// Of a page that is served: asks for what it shows, and for what is new.

const EVERY = 2000;  // milliseconds
const EVERY_AT_REST = 15000;  // of a run that has ended
const AT_ONCE = 100;  // of a record that is being read
const AWAY = "No answer: the run has ended, or its machine is away. This page shows the last that was known.";
const live = { state: null, running: [], away: false, last: 0 };
const ended = new Map();  // attempts by id, the last ones

function address(path, parameters) {
  const token = new URLSearchParams(location.search).get("token") || "";
  return `${path}?${new URLSearchParams({ token, ...parameters })}`;
}

async function ask(path, parameters) {
  const answer = await fetch(address(path, parameters), { cache: "no-store" });
  if (!answer.ok) throw new Error(String(answer.status));
  return answer.json();
}

// The part of the table of groups that is to be shown.
async function askGroups(most) {
  const told = await ask("groups", { ...tableQuery(), first: 0, most });
  take(told);
  return { rows: told.groups, count: told.count, all: run.all_groups };
}

// A group, by its number or a rollout, with those beside it in the table.
async function askGroup(parameters) {
  const told = await ask("group", { ...tableQuery(), ...parameters });
  take(told);
  for (const group of told.groups) Object.assign(group, { before: told.before, after: told.after });
}

// Attempts that ended since, for the panels.
async function askEnded() {
  for (let more = true; more;) {
    const told = await ask("ended", { after: live.last });
    for (const row of told.rows) {
      ended.delete(row.id);
      ended.set(row.id, row);
    }
    live.last = told.last;
    more = told.more;
  }
  for (const id of ended.keys()) {
    if (ended.size <= run.most) break;
    ended.delete(id);
  }
  run.rollouts = [...ended.values()];
}

// What there is now: progress, slots, sandboxes, services that are away.
function livePanel() {
  const state = live.state;
  if (SERVED && state === null && live.away) return el("p", "warning box live", AWAY);
  if (!SERVED || state === null) return null;
  const { done, finished } = run;
  const recent = known(run.rollouts.map((r) => r.started_at === null ? null : r.started_at + (r.duration_s || 0)))
    .filter((end) => end > state.now - 300);
  const lasted = Math.max(1, Math.min(300, state.now - state.began));
  const left = state.wanted && finished ? Math.max(0, state.wanted - done) * (state.now - state.began) / finished : null;
  const names = Object.keys(state.hosts).sort();
  const pairs = [
    ["groups", state.wanted ? `${whole(done)} of ${whole(state.wanted)}` : whole(done)],
    ...(left === null ? [] : [["time left", left < 90 ? seconds(left) : `${whole(left / 60)} min`]]),
    ["rollouts a minute", (recent.length / lasted * 60).toFixed(1)],
    ["waiting for a slot", whole(state.waiting)],
    ...names.flatMap((name) => {
      const host = state.hosts[name];
      const states = Object.entries(host.sandboxes).filter(([, n]) => n).map(([what, n]) => `${n} ${what}`);
      const away = Object.entries(host.away).filter(([, is]) => is).map(([what]) => what);
      return [[name ? `slots of ${name}` : "slots", `${host.running} of ${host.slots} in use`],
        [name ? `sandboxes of ${name}` : "sandboxes", states.join(", ") || "none"],
        [name ? `completions of ${name}` : "completions awaited", whole(host.sampling)],
        ...(away.length ? [[name ? `away from ${name}` : "away", away.join(", ")]] : [])];
    }),
  ];
  return el("section", `panel wide live${live.away ? " away" : ""}`, el("h2", "", "Now"),
    live.away ? el("p", "warning box", AWAY) : null, facts(pairs));
}

// What changes without the record: by the name of its place, which is there always.
const NOW = { now: livePanel, running: runningPanel };

function nowPanel(name) {
  return SERVED ? el("div", name, NOW[name]()) : null;
}

// Rollouts that have not ended: each can be opened.
function runningPanel() {
  if (!live.running.length) return null;
  const list = el("ul", "rows");
  for (const { id, task, turns, seconds: since } of live.running) {
    list.append(el("li", "", link(rolloutHash({ id }), "", shown(id)), ` ${counted(turns, "completion")}, ${seconds(since)} `, el("span", "reason", shown(task))));
  }
  return el("section", "panel wide", el("h2", "", "Rollouts under way"), list);
}

async function follow() {
  let soon = EVERY;
  try {
    const { state, running, ...told } = await ask("update", {});
    const first = run.version < 0;
    const changed = told.version !== run.version;
    Object.assign(run, told);
    Object.assign(live, { state, running, away: false });
    if (told.behind) soon = AT_ONCE;
    else if (!told.going_on) soon = EVERY_AT_REST;
    if (first) await route();
    if (changed) await askEnded();
    await refresh(changed);
  } catch {
    live.away = true;
    await refresh(false);
  }
  setTimeout(follow, soon);
}
