# SPDX-License-Identifier: Apache-2.0
"""Run one vLLM engine over a job file; a process of its own because vLLM keeps global state."""

import json
import sys
from pathlib import Path


def main(job_file: Path) -> None:
    from vllm import LLM, SamplingParams

    job = json.loads(job_file.read_text())
    llm = LLM(**job["engine"])
    sampling = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], logprobs=5)
    texts: list[str] = []
    tokens: list[list[int]] = []
    cached: list[int] = []
    logprobs: list[list[dict[int, float]]] = []
    for batch in job["batches"]:
        for answer in llm.generate(batch, sampling, use_tqdm=False):
            texts.append(answer.outputs[0].text)
            tokens.append(list(answer.outputs[0].token_ids))
            cached.append(answer.num_cached_tokens or 0)
            logprobs.append(
                [{k: v.logprob for k, v in step.items()} for step in answer.outputs[0].logprobs]
            )
    result = {"texts": texts, "tokens": tokens, "cached": cached, "logprobs": logprobs}
    job_file.with_suffix(".out").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
