// The data of the run, and what is computed from them.

const LIVE = document.getElementById("live") !== null;
const run = { facts: [], notes: [], warnings: [], kinds: {}, groups: [], rollouts: [], bad_tasks: [],
  totals: null, skipped: { rollout_lines: 0, group_lines: 0 }, left_out: 0, forgotten: 0, forgotten_groups: 0, most: null };
const groupOf = new Map();
const rolloutOf = new Map();

function kindOf(outcome) {
  if (!Object.hasOwn(run.kinds, outcome)) return "failed";
  return outcome === "finished" ? "finished" : run.kinds[outcome];
}

// Of a run that goes on: whether the group may still be written.
function isUnderWay(group) {
  return LIVE && !group.written && !group.dropped;
}

function isCorrect(rollout) {
  return rollout.solved;
}

function counts(names) {
  const found = new Map();
  for (const name of names) found.set(name, (found.get(name) || 0) + 1);
  return [...found].sort((a, b) => b[1] - a[1]);
}

// Takes groups that are new or have changed, each with all its attempts, and everything else as it is now.
function take({ groups, rollouts, ...rest }) {
  Object.assign(run, rest);
  for (const group of groups) {
    for (const before of (groupOf.get(group.number) || { attempts: [] }).attempts) rolloutOf.delete(before.id);
    group.attempts = [];
    groupOf.set(group.number, group);
  }
  for (const rollout of rollouts) {
    rolloutOf.set(rollout.id, rollout);
    groupOf.get(rollout.group).attempts.push(rollout);
  }
  for (const group of groups) compute(group);
  for (const [number, group] of groupOf) {
    if (run.most === null || rolloutOf.size <= run.most) break;
    groupOf.delete(number);
    for (const rollout of group.attempts) rolloutOf.delete(rollout.id);
  }
  run.groups = [...groupOf.values()].sort((a, b) => a.number - b.number);
  run.rollouts = [...rolloutOf.values()];
}

function compute(group) {
  group.members = group.attempts.filter((r) => r.score !== null);
  const made = group.attempts.filter((r) => r.counts);  // without those that came again with their score
  group.draws = made.length - new Set(made.map((r) => r.index)).size;
  const scores = group.members.map((m) => m.score);
  group.mean = mean(scores);
  group.spread = deviation(scores);
  group.tokens = mean(group.members.map((m) => m.tokens));
  group.seconds = mean(known(group.members.map((m) => m.duration_s)));
  group.cost = made.some((r) => r.cost !== null) ? made.reduce((sum, r) => sum + r.cost, 0) : null;
  group.outcomes = counts(group.attempts.map((r) => r.outcome)).join();
  group.text = [group.task, group.question, group.dropped, ...group.attempts.map((r) => r.answer || "")].join("\n").toLowerCase();
}

// What the page shows of a rollout besides its row; null: this file does not have it.
async function detailsOf(rollout) {
  if (LIVE) return ask("rollout", { id: rollout.id });
  return rollout.detail === null ? null : JSON.parse(document.getElementById(`detail-${rollout.detail}`).textContent);
}
