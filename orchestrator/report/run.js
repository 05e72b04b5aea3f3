// The data of the run, and what is computed from them.

const LIVE = document.getElementById("live") !== null;
const run = { name: "", directory: "", facts: [], notes: [], warnings: [], kinds: {}, groups: [], rollouts: [], bad_tasks: [],
  totals: null, skipped: { rollout_lines: 0, group_lines: 0 }, left_out: 0, only: "", evaluation: null, shared: false, forgotten: 0, forgotten_groups: 0, most: null };
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

// Of the attempts with this outcome: whether any solved its task.
function anyCorrect(rollouts, outcome) {
  return rollouts.some((r) => r.outcome === outcome && isCorrect(r));
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
  group.right = group.members.length > 0 && group.members.every(isCorrect);
  group.wrong = group.members.length > 0 && !group.members.some(isCorrect);
  group.mean = mean(scores);
  group.spread = deviation(scores);
  group.tokens = mean(group.members.map((m) => m.tokens));
  group.seconds = mean(known(group.members.map((m) => m.duration_s)));
  group.cost = made.some((r) => r.cost !== null) ? made.reduce((sum, r) => sum + r.cost, 0) : null;
  group.outcomes = counts(group.attempts.map((r) => r.outcome)).join();
  group.text = [group.task, group.question, group.dropped,
    ...group.attempts.flatMap((r) => [r.id, r.answer || "", r.reason, ...Object.keys(r.errors)])].join("\n").toLowerCase();
}

// Adds what this file has of transcripts and tools to what is searched: when somebody searches for the first time.
let searchable = LIVE;

function readTranscripts() {
  if (searchable) return;
  searchable = true;
  for (const rollout of run.rollouts.filter((r) => r.detail !== null)) {
    const { completions, steps, tool_calls: calls } = JSON.parse(document.getElementById(`detail-${rollout.detail}`).textContent);
    const said = [...completions.flatMap((c) => [c.reasoning, c.text]), ...steps.flatMap((s) => [s.code, s.observations, s.error]),
      ...calls.flatMap((c) => [c.name, c.arguments, c.output || "", c.error || ""])];
    groupOf.get(rollout.group).text += `\n${said.join("\n").toLowerCase()}`;
  }
}

// What the page shows of a rollout besides its row; null: this file does not have it.
async function detailsOf(rollout) {
  if (LIVE) return ask("rollout", { id: rollout.id });
  return rollout.detail === null ? null : JSON.parse(document.getElementById(`detail-${rollout.detail}`).textContent);
}
