"""What `orchestrator demo` plays: a recorded run of a real model, its tasks, and the model's tokenizer.

    recording/            run.json (how it was made), rollouts.jsonl.xz (what the model said, token by token)
    tasks.jsonl, files/   the tasks it was recorded on, some of `examples/`
    tokenizer.xz          Qwen2.5's tokenizer, so that prompts become the ids the model was given

`recording.py` and `tokenizer.py` read and make these files; `commands/demo.py` plays them.
"""
