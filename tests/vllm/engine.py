"""A real engine that does what it is told: a line of JSON on stdin, a line of JSON on `--answers`.

Runs in the interpreter that has vLLM, and needs nothing else of this repository. The model is a tiny Llama with random
weights, the same ones each time.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def start(model: Path, tensor_parallel: int) -> Any:
    """Start the engine; its workers are processes of their own."""
    from vllm import LLM

    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODEL))
    return LLM(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        tensor_parallel_size=tensor_parallel,
        distributed_executor_backend="mp",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=8,
        dtype="float32",
        seed=0,
        disable_log_stats=True,
    )


def generate(llm: Any, prompts: list[list[int]], tokens: int, temperature: float) -> dict[str, Any]:
    """Run some requests together; the tokens of each, and the seconds from step to step."""
    from vllm import SamplingParams

    how = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True, detokenize=False, seed=7)
    engine = llm.llm_engine
    for number, prompt in enumerate(prompts):
        engine.add_request(f"{time.monotonic_ns()}-{number}", {"prompt_token_ids": prompt}, how)
    steps, done = [], {}
    before = time.perf_counter()
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        if outputs:
            steps.append(now - before)
            before = now
        for output in outputs:
            if output.finished:
                done[output.request_id.partition("-")[2]] = list(output.outputs[0].token_ids)
    return {"tokens": [done[number] for number in sorted(done)], "steps_s": steps}


def main() -> None:
    """Answer until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--answers", type=int, required=True, help="a file descriptor to write answers to")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tensor-parallel", type=int, default=2)
    options = parser.parse_args()
    os.set_inheritable(options.answers, False)
    with os.fdopen(options.answers, "w", buffering=1) as answers:
        began = time.perf_counter()
        llm = start(options.model, options.tensor_parallel)
        print(json.dumps({"ready_s": time.perf_counter() - began}), file=answers)
        for line in sys.stdin:
            print(json.dumps(generate(llm, **json.loads(line))), file=answers)


if __name__ == "__main__":
    main()
