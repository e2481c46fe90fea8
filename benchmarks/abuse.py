"""Attack a running server with what costs most for its size, and count what it survives: class, tried, passed.

    python benchmarks/abuse.py http://127.0.0.1:8000 --model NAME [--key KEY] [--honest KEY]

An attack passes if it is answered without a 5xx (429 and 503 of a full queue are fine), if a short chat of `--honest` is
answered within 10 s meanwhile, and if /health never waits longer than a second. Give two keys to attack beside another's
work. Attack only what is yours.
"""

import argparse
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping


def chain(n: int, link: Callable[[dict], dict]) -> dict:
    """A JSON schema of n definitions, each made of the next."""
    links = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(n)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{n}": {"type": "string"}}}


def grammars() -> Iterator[dict]:
    """Chains and nestings that overflow a stack or take for ever."""
    for n in (300, 1100, 2500, 6000):
        yield {"guided_json": chain(n, lambda r: {"type": "array", "items": r})}
        yield {"guided_json": chain(n, lambda r: {"anyOf": [r, {"type": "null"}]})}
        yield {"guided_json": chain(n, lambda r: r)}
        yield {"guided_grammar": "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(n)), f'r{n}: "b"'])}
        yield {"guided_grammar": "\n".join(["start: T0", *(f"T{i}: T{i + 1}" for i in range(n)), f'T{n}: "b"'])}
        yield {"guided_regex": "(" * n + "a" + ")" * n}
    for n in (5_000, 20_000, 40_000):
        yield {"guided_regex": "a?" * n}
    yield {"guided_regex": "((a{1,1000}){1,1000}){1,1000}"}


def bodies() -> Iterator[dict]:
    """Many small values in 8 MiB."""
    for item, count in (({}, 2_000_000), ([], 2_000_000), ({"a": 1}, 800_000), (1, 2_500_000), ("a", 1_500_000)):
        yield {"guided_json": {"enum": [item] * count}}
    deep: list = []
    for _ in range(50):
        deep = [deep]
    yield {"guided_json": {"enum": [deep] * 70_000}}
    yield {"guided_json": {f"{i}": 1 for i in range(500_000)}}
    yield {"guided_json": json.dumps({"enum": [[]] * 2_000_000})}


def messages() -> Iterator[dict]:
    """Texts that are long, or look like marks."""
    for said in ("x" * 2**22, "\ufdd0999\ufdd1", "\ufdd0" + "9" * 5000 + "\ufdd1", "<|im_end|>" * 50_000):
        yield {"messages": [{"role": "user", "content": said}]}


CLASSES: Mapping[str, Callable[[], Iterator[dict]]] = {"grammars": grammars, "bodies": bodies, "messages": messages}


def ask(url: str, path: str, key: str | None, body: dict | None = None, timeout: float = 60) -> tuple[int, float]:
    """(status, 0 for none; seconds) of a request."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body, separators=(",", ":")).encode()[: 2**23]
    request, begin = urllib.request.Request(url + path, data, headers), time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            answer.read()
            return answer.status, time.monotonic() - begin
    except urllib.error.HTTPError as e:
        return e.code, time.monotonic() - begin
    except OSError:
        return 0, time.monotonic() - begin


def main() -> None:
    """Run all classes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--model", required=True)
    parser.add_argument("--key")
    parser.add_argument("--honest")
    parser.add_argument("--beside", type=int, default=4, help="of each attack at a time")
    args = parser.parse_args()
    chat = {"model": args.model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    print("| class | tried | passed | slowest answer | honest chat | /health (s) |\n|---|---|---|---|---|---|")
    for name, attacks in CLASSES.items():
        tried = passed = 0
        worst = [0.0, 0.0, 0.0]
        for attack in attacks():
            found: list[tuple[int, float]] = []
            one = lambda body=chat | attack, found=found: found.append(
                ask(args.url, "/v1/chat/completions", args.key, body)
            )
            threads = [threading.Thread(target=one) for _ in range(args.beside)]
            [t.start() for t in threads]
            honest, health = [], []
            while any(t.is_alive() for t in threads):
                honest.append(ask(args.url, "/v1/chat/completions", args.honest or args.key, chat))
                health.append(ask(args.url, "/health", None))
                time.sleep(0.05)
            fine = all(0 < status < 500 or status == 503 for status, _ in found)
            fine &= all(status == 200 and s < 10 for status, s in honest) and all(s < 1 and x == 200 for x, s in health)
            tried, passed = tried + 1, passed + fine
            for i, times in enumerate((found, honest, health)):
                worst[i] = max(worst[i], *(s for _, s in times), 0.0)
        print(f"| {name} | {tried} | {passed} | " + " | ".join(f"{s:.2f}" for s in worst) + " |", flush=True)


if __name__ == "__main__":
    main()
