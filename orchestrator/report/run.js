// The data of the run, and what is computed from them.

const SERVED = document.getElementById("live") !== null;  // the page asks a server for what it shows
const MOST_KNOWN = 4000;  // groups that a served page keeps
// A served page has of `rollouts` what panels are drawn from, and no `groups`: it asks for those that it shows.
const run = { name: "", directory: "", facts: [], notes: [], warnings: [], kinds: {}, groups: [], rollouts: [], bad_tasks: [],
  totals: null, version: -1, columns: [], all_groups: 0, skipped: { rollout_lines: 0, group_lines: 0 }, left_out: 0, only: "",
  evaluation: null, shared: false, mcp_tools: {}, forgotten: 0, forgotten_groups: 0, most: null };
const groupOf = new Map();
const rolloutOf = new Map();

function kindOf(outcome) {
  if (!Object.hasOwn(run.kinds, outcome)) return "failed";
  return outcome === "finished" ? "finished" : run.kinds[outcome];
}

// Of a run that goes on: whether the group may still be written.
function isUnderWay(group) {
  return SERVED && run.going_on && !group.written && !group.dropped;
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

// Takes groups that are new or have changed, each with all its attempts.
function take({ groups, rollouts }) {
  if (SERVED && groupOf.size > MOST_KNOWN) for (const known of [groupOf, rolloutOf]) known.clear();
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
}

// Takes all there is, of a page that has it.
function takeAll({ groups, rollouts, ...rest }) {
  take({ groups, rollouts });
  Object.assign(run, rest, { groups: [...groupOf.values()].sort((a, b) => a.number - b.number), rollouts: [...rolloutOf.values()] });
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
let searchable = false;

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
  if (SERVED) return ask("rollout", { id: rollout.id });
  return rollout.detail === null ? null : JSON.parse(document.getElementById(`detail-${rollout.detail}`).textContent);
}
