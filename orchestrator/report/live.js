// Of a page that follows a run: asks for what is new, and shows it.

const EVERY = 2000;  // milliseconds
const AWAY = "No answer: the run has ended, or its machine is away. This page shows the last that was known.";
const live = { version: 0, state: null, away: false };

function address(path, parameters) {
  const token = new URLSearchParams(location.search).get("token") || "";
  return `${path}?${new URLSearchParams({ token, ...parameters })}`;
}

async function ask(path, parameters) {
  const answer = await fetch(address(path, parameters), { cache: "no-store" });
  if (!answer.ok) throw new Error(String(answer.status));
  return answer.json();
}

// What there is now: progress, slots, sandboxes, services that are away.
function livePanel() {
  const state = live.state;
  if (LIVE && state === null && live.away) return el("p", "warning box live", AWAY);
  if (!LIVE || state === null) return null;
  const done = run.groups.filter((g) => g.written || g.dropped).length + run.forgotten_groups;
  const recent = known(run.rollouts.map((r) => r.started_at === null ? null : r.started_at + (r.duration_s || 0)))
    .filter((end) => end > state.now - 300);
  const lasted = Math.max(1, Math.min(300, state.now - state.began));
  const finished = run.groups.filter((g) => !isUnderWay(g) && g.attempts.some((r) => r.started_at !== null && r.started_at > state.began)).length;
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

async function follow() {
  try {
    const told = await ask("update", { since: live.version });
    const first = live.state === null;
    live.version = told.version;
    live.state = told.state;
    live.away = false;
    take(told);
    if (first && !home.hidden) home.replaceChildren();
    refresh(new Set(told.groups.map((g) => g.number)));
  } catch {
    live.away = true;
    refresh(new Set());
  }
  setTimeout(follow, EVERY);
}
