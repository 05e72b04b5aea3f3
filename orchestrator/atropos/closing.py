"""What a feed has done, for wandb and for the lines at the end."""

from orchestrator.atropos.feed import Feed


def feed_metrics(feed: Feed) -> dict[str, float]:
    """Its state."""
    return {
        "serve/groups_delivered_total": feed.ledger.groups,
        "serve/groups_cancelled_total": feed.cancelled,
        "serve/groups_waiting": feed.queued,
        "serve/groups_under_way": feed.under_way,
    }


def feed_rows(feed: Feed, step: int, thrown_away_s: float) -> list[tuple[str, object]]:
    """For people. `step`: the trainer's; `thrown_away_s`: of sandboxes."""
    ledger = feed.ledger
    trouble = [
        f"{count} {what}"
        for count, what in (
            (feed.refused, "refused"),
            (ledger.lost, "lost with the run-api"),
            (feed.delivery.uncertain, "perhaps not arrived"),
            (feed.unsent, "written but not delivered"),
        )
        if count
    ]
    return [
        ("delivered", ", ".join([f"{ledger.delivered} groups; the trainer is at step {step}", *trouble])),
        ("cancelled", f"{feed.cancelled} groups came again; {thrown_away_s:.1f} s of sandboxes thrown away"),
    ]
