// The data of the run, and what is computed from them once.

const run = JSON.parse(document.getElementById("run").textContent);
const groupOf = new Map(run.groups.map((g) => [g.number, g]));
const rolloutOf = new Map(run.rollouts.map((r) => [r.id, r]));

function kindOf(outcome) {
  if (!Object.hasOwn(run.kinds, outcome)) return "failed";
  return outcome === "finished" ? "finished" : run.kinds[outcome];
}

function isCorrect(rollout) {
  return rollout.solved;
}

function counts(names) {
  const found = new Map();
  for (const name of names) found.set(name, (found.get(name) || 0) + 1);
  return [...found].sort((a, b) => b[1] - a[1]);
}

for (const group of run.groups) group.attempts = [];
for (const rollout of run.rollouts) groupOf.get(rollout.group).attempts.push(rollout);
for (const group of run.groups) {
  group.members = group.attempts.filter((r) => r.score !== null);
  group.draws = group.attempts.length - new Set(group.attempts.map((r) => r.index)).size;
  const scores = group.members.map((m) => m.score);
  group.mean = mean(scores);
  group.spread = deviation(scores);
  group.tokens = mean(group.members.map((m) => m.tokens));
  group.seconds = mean(known(group.members.map((m) => m.duration_s)));
  group.outcomes = counts(group.attempts.map((r) => r.outcome)).join();
  group.text = [group.task, group.question, ...group.attempts.map((r) => r.answer || "")].join("\n").toLowerCase();
}
