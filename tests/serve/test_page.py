"""The playground in a real browser, which Chromium's DevTools protocol drives; skipped where there is no Chromium."""

import asyncio
import contextlib
import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest

aiohttp = pytest.importorskip("aiohttp", reason="needs the serve extra")
from fdel.serve.server import openai  # noqa: E402
from tests.serve.small import EOS  # noqa: E402
from tests.serve.wire import also, at_rest, call, wait_for  # noqa: E402

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
         "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream",
         "--remote-debugging-port=0", "--window-size=1100,760")  # fmt: skip
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="no chromium or google-chrome on PATH"),
]


class Browser:
    """One page. `events` are what the browser told: (method, parameters)."""

    def __init__(self, folder: Path):
        self.loop, self.events, self.answers, self.count = asyncio.new_event_loop(), [], {}, 0
        command = [PROGRAM, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        port = folder / "DevToolsActivePort"
        end = time.monotonic() + 120
        while not (port.exists() and "\n" in port.read_text()):
            assert time.monotonic() < end and self.process.poll() is None, "the browser did not start"
            time.sleep(0.05)
        self.loop.run_until_complete(self._connect(int(port.read_text().split()[0])))
        for domain in ("Page", "Runtime", "Network", "Log", "DOM"):
            self.do(f"{domain}.enable")

    async def _connect(self, port: int) -> None:
        self.session = aiohttp.ClientSession()
        async with self.session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            target = next(t for t in await answer.json() if t["type"] == "page")
        self.socket = await self.session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=2**27)

    async def _read(self, until, seconds: float) -> None:
        async with asyncio.timeout(seconds):
            while not until():
                said = json.loads((await self.socket.receive()).data)
                if "id" in said:
                    self.answers[said["id"]] = said
                else:
                    self.events.append((said["method"], said["params"]))

    def do(self, method: str, **parameters) -> dict:
        """Give a command, and return its result."""
        self.count += 1
        number = self.count
        asked = {"id": number, "method": method, "params": parameters}
        self.loop.run_until_complete(self.socket.send_json(asked))
        self.loop.run_until_complete(self._read(lambda: number in self.answers, 60))
        answer = self.answers.pop(number)
        assert "error" not in answer, answer
        return answer["result"]

    def js(self, code: str):
        """The value of an expression in the page."""
        result = self.do("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, code: str) -> None:
        """Wait, at most 60 seconds, until an expression is true."""
        end = time.monotonic() + 60
        while not self.js(f"Boolean({code})"):
            assert time.monotonic() < end, (code, self.js("document.body.innerText"))
            time.sleep(0.05)

    def open(self, address: str) -> None:
        self.js("window.left = true")  # the page that is shown may be the same one, and stays for a moment
        self.do("Page.navigate", url=address)
        self.loaded()

    def reload(self) -> None:
        self.js("window.left = true")
        self.do("Page.reload")
        self.loaded()

    def loaded(self) -> None:
        """Wait until another document is there, complete."""
        self.until("!window.left && document.readyState === 'complete'")

    def type(self, selector: str, said: str, key: str = "") -> None:
        """Write into a field as hands do, and press a key."""
        self.js(f"document.querySelector('{selector}').focus()")
        self.js(f"document.querySelector('{selector}').select()")
        self.do("Input.insertText", text=said)
        if key:
            for kind in ("keyDown", "keyUp"):
                self.do("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=13, text="\r")

    def click(self, selector: str) -> None:
        place = self.js(f"(r => [r.x + r.width / 2, r.y + r.height / 2])"
                        f"(document.querySelector('{selector}').getBoundingClientRect())")  # fmt: skip
        for kind in ("mousePressed", "mouseReleased"):
            self.do("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def requests(self) -> list[dict]:
        return [p["request"] for m, p in self.events if m == "Network.requestWillBeSent"]

    def errors(self) -> list[str]:
        """What the console would show in red, but for refused keys."""
        found = [p["exceptionDetails"]["text"] for m, p in self.events if m == "Runtime.exceptionThrown"]
        found += [str(p["args"]) for m, p in self.events if m == "Runtime.consoleAPICalled" and p["type"] == "error"]
        entries = [p["entry"] for m, p in self.events if m == "Log.entryAdded" and p["entry"]["level"] == "error"]
        return found + [e["text"] for e in entries if "status of 401" not in e["text"]]

    def close(self) -> None:
        with contextlib.suppress(AssertionError, TimeoutError, TypeError):
            self.do("Browser.close")
        self.loop.run_until_complete(self.session.close())
        self.loop.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    found = Browser(tmp_path_factory.mktemp("chromium"))
    yield found
    found.close()


@pytest.fixture
def page(browser, running, monkeypatch):
    """The playground, opened with a key; the engine takes its time, so that there is something to see."""
    device = running.served.engine._core.device
    run = device._run
    monkeypatch.setattr(device, "_run", lambda *args, **options: time.sleep(0.02) or run(*args, **options))
    address = f"http://127.0.0.1:{running.port}/"
    browser.open(address)
    browser.js("sessionStorage.clear()")
    browser.open(address)
    del browser.events[:]
    browser.type("#key", running.secrets["service"], "Enter")
    browser.until("document.querySelector('#model') && document.querySelector('#model').value === 'small'")
    yield browser
    wait_for(lambda: at_rest(running))


def last(page) -> str:
    return page.js("(x => x.length ? x[x.length - 1].textContent : '')(document.querySelectorAll('.assistant'))")


def test_a_key_is_asked_for(browser, running):
    """A wrong one is refused and forgotten, the right one stays in its tab."""
    browser.open(f"http://127.0.0.1:{running.port}/")
    browser.js("sessionStorage.clear()")
    browser.open(f"http://127.0.0.1:{running.port}/")
    browser.type("#key", "fdel-wrong", "Enter")
    browser.until("document.querySelector('#said').textContent.includes('401')")
    assert browser.js("sessionStorage.length") == 0 and browser.js("document.querySelector('#talk')") is None
    browser.type("#key", running.secrets["user"], "Enter")
    browser.until("document.querySelector('#talk')")
    browser.until("document.querySelector('#graphs').textContent.includes('may not')")  # a user's key reads no metrics
    browser.reload()
    browser.until("document.querySelector('#talk')")
    assert browser.js("localStorage.length + document.cookie.length") == 0
    assert running.secrets["user"] not in str([r["url"] for r in browser.requests()])


def test_a_conversation(page, running):
    """Text comes in pieces and is that of the server; controls reach the request; the second turn holds the first."""
    page.js("""(() => { window.seen = [];
      new MutationObserver(() => seen.push([...document.querySelectorAll('.assistant')].map(x => x.textContent).join('|')))
        .observe(document.querySelector('#talk'), { childList: true, subtree: true, characterData: true }) })()""")
    for name, value in (("temperature", 0), ("top_p", 0.9), ("max_completion_tokens", 20), ("seed", 7)):
        page.type(f"#{name}", str(value))
    page.type("#system", "be brief")
    page.type("#text", "the weather", "Enter")
    page.until("!document.querySelector('#send').disabled && document.querySelector('#speed').textContent")
    (sent,) = [json.loads(r["postData"]) for r in page.requests() if r["url"].endswith("/chat/completions")]
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the weather"}]
    assert sent == {"model": "small", "stream": True, "stream_options": {"include_usage": True}, "messages": messages,
                    "temperature": 0, "top_p": 0.9, "max_completion_tokens": 20, "seed": 7}  # fmt: skip
    whole = call(
        running, "POST", "/v1/chat/completions", {k: v for k, v in sent.items() if not k.startswith("stream")}
    )[1]
    assert last(page) == whole["choices"][0]["message"]["content"]
    seen = page.js("seen.filter((x, i) => x && x !== seen[i - 1])")
    assert len(seen) > 3 and all(b.startswith(a) for a, b in zip(seen, seen[1:], strict=False))
    assert "20 tokens" in page.js("document.querySelector('#speed').textContent")
    page.type("#text", "and the music", "Enter")
    page.until("document.querySelectorAll('.assistant').length === 2 && !document.querySelector('#send').disabled")
    again = [json.loads(r["postData"]) for r in page.requests() if r["url"].endswith("/chat/completions")][1]
    assert [m["role"] for m in again["messages"]] == ["system", "user", "assistant", "user"]
    assert page.js("document.querySelector('#text').value") == ""
    page.click("#clear")
    assert page.js("document.querySelector('#talk').children.length") == 0
    assert page.errors() == []
    assert all(r["url"].startswith(f"http://127.0.0.1:{running.port}/") for r in page.requests())


def test_stop(page, running):
    """The button ends the answer here and in the engine, what came stays, and the next message is answered."""
    page.type("#temperature", "0")  # an answer that does not end by itself
    page.type("#text", "the weather", "Enter")
    page.until("document.querySelector('.assistant') && document.querySelector('.assistant').textContent.length > 5")
    page.click("#stop")
    page.until("!document.querySelector('#send').disabled && document.querySelector('#stop').disabled")
    wait_for(lambda: at_rest(running))
    said = last(page)
    time.sleep(0.3)
    assert last(page) == said and page.errors() == []
    page.type("#max_completion_tokens", "3")
    page.type("#text", "again", "Enter")
    page.until("document.querySelectorAll('.assistant').length === 2 && !document.querySelector('#send').disabled")


def test_a_refusal_is_shown(page):
    page.type("#temperature", "9")
    page.type("#text", "hello", "Enter")
    page.until("document.querySelector('.error')")
    assert "temperature" in page.js("document.querySelector('.error').textContent")
    assert not page.js("document.querySelector('#send').disabled")


def test_an_empty_answer_is_said_to_be_one(page, monkeypatch):
    """A model may end at once: the page says so, and the message is no part of what is said next."""
    parse = openai.parse_chat
    monkeypatch.setattr(openai, "parse_chat", lambda b, limits: parse(b | {"logit_bias": {str(EOS): 100}}, limits))
    for shown in (1, 2):
        page.type("#text", "the weather", "Enter")
        page.until(
            f"document.querySelectorAll('.note').length === {shown} && !document.querySelector('#send').disabled"
        )
    assert page.js("document.querySelector('.note').textContent") == "The answer is empty." and not last(page)
    sent = [json.loads(r["postData"]) for r in page.requests() if r["url"].endswith("/chat/completions")]
    assert [len(body["messages"]) for body in sent] == [1, 1] and page.errors() == []


def test_graphs_move(page, running):
    """What they show is what /metrics says, and it changes while there is work."""
    picture = "[...document.querySelectorAll('canvas')].map(c => c.toDataURL()).join()"
    value = "Number([...document.querySelectorAll('figcaption')].find(c => c.textContent.startsWith('{}'))" \
            ".querySelector('b').textContent)"  # fmt: skip
    page.until("document.querySelectorAll('canvas').length === 5 && document.querySelector('figcaption b').textContent")
    before = page.js(picture)
    page.type("#temperature", "0")
    page.type("#max_completion_tokens", "180")
    # The page reads /metrics once a second, and on a busy machine less often than an answer lasts: ask until it met one.
    largest = "({}).every(name => (window.largest[name] || 0) > 0)".format(["running", "tokens/s", "cache use, %"])
    page.js("""window.largest = {};
        for (const caption of document.querySelectorAll('figcaption')) new MutationObserver(() => {
            const [name, value] = [...caption.childNodes].map(node => node.textContent);
            window.largest[name] = Math.max(window.largest[name] || 0, Number(value));
        }).observe(caption, { childList: true, subtree: true, characterData: true });""")
    for _ in range(20):
        page.type("#text", "the weather", "Enter")
        page.until(f"{largest} || !document.querySelector('#send').disabled")
        if page.js(largest):
            break
    assert page.js(largest)
    assert page.js(picture) != before
    page.click("#stop")
    page.until(value.format("running") + " === 0")
    assert page.errors() == []


def test_nothing_else_runs_in_the_page(page, running):
    """A message is no HTML, and the policy of the page lets no other script run and no other host be asked."""
    page.type("#temperature", "0")
    page.type("#max_completion_tokens", "3")
    page.type("#text", "<img src=x onerror=window.evil=1><script>window.evil=1</script>", "Enter")
    page.until("document.querySelector('.assistant') && !document.querySelector('#send').disabled")
    assert page.js("document.querySelector('.user').children.length") == 0
    page.js("document.body.append(Object.assign(document.createElement('script'), { textContent: 'window.evil = 1' }))")
    page.js("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=window.evil=1>')")
    page.js("void setTimeout('window.evil = 1', 0)")
    assert page.js("fetch('http://localhost:1/').then(() => 'asked', error => error.name)") == "TypeError"
    assert page.js("new Promise(done => setTimeout(() => done(window.evil), 300))") is None
    away = [r["url"] for r in page.requests() if not r["url"].startswith(f"http://127.0.0.1:{running.port}/")]
    blocked = [e for e in page.errors() if "Content Security Policy" in e]
    assert len(blocked) >= 3 and not [u for u in away if "localhost" not in u]


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}}}  # fmt: skip


def test_calls_of_tools_are_shown_and_answered(page, monkeypatch):
    """A call appears as such; what is typed next is its result, and all of it goes back to the server."""
    parse = openai.parse_chat
    force = lambda body, limits: parse(body | {"tool_choice": "required"}, limits)
    monkeypatch.setattr(openai, "parse_chat", lambda b, limits: force(b, limits) if "tools" in b else parse(b, limits))
    page.js(f"document.querySelector('#tools').value = {json.dumps(json.dumps([TOOL]))}")
    page.type("#max_completion_tokens", "120")
    page.type("#temperature", "0")
    page.type("#text", "the weather", "Enter")
    page.until("document.querySelector('.call') && !document.querySelector('#send').disabled")
    assert page.js("document.querySelector('.call').dataset.kind") == "call of weather"
    assert json.loads(page.js("document.querySelector('.call').textContent")) == {"city": "Paris"}
    assert page.js("document.querySelector('#text').placeholder") == "Result of weather"
    page.js("document.querySelector('#tools').value = ''")
    page.type("#max_completion_tokens", "3")
    page.type("#text", "fine", "Enter")
    page.until("document.querySelectorAll('.tool').length === 1 && !document.querySelector('#send').disabled")
    sent = [json.loads(r["postData"]) for r in page.requests() if r["url"].endswith("/chat/completions")][1]
    user, assistant, result = sent["messages"]
    assert assistant["tool_calls"][0]["id"] == result["tool_call_id"] and result["content"] == "fine"
    assert page.js("document.querySelector('#text').placeholder").startswith("Say something") and page.errors() == []
    page.js("document.querySelector('#tools').value = 'no JSON'")
    page.type("#text", "again", "Enter")
    page.until("document.querySelector('.error')")
    assert not page.js("document.querySelector('#send').disabled")


def test_reasoning_and_errors_are_shown_as_such(page):
    """Reasoning apart from the answer, an error in a stream and one that is no JSON in a box of their own."""
    chunk = lambda **delta: {"choices": [{"delta": delta, "finish_reason": None}]}
    frames = [chunk(reasoning_content="so"), chunk(content="yes"), {"error": {"message": "it broke"}}]
    sent = "".join(f"data: {json.dumps(f)}\n\n" for f in frames)
    answer = lambda said, status: page.js(
        f"window.fetch = (f => (u, o) => u.endsWith('completions') ? Promise.resolve(new Response("
        f"{json.dumps(said)}, {{ status: {status} }})) : f(u, o))(window.fetch), 0")  # fmt: skip
    answer(sent, 200)
    page.type("#text", "hello", "Enter")
    page.until("document.querySelector('.error')")
    shown = page.js(
        "[...document.querySelectorAll('#talk > div')].map(x => [x.className, x.dataset.kind || '', x.textContent])"
    )
    assert shown == [["user", "", "hello"], ["assistant reasoning", "reasoning", "so"], ["assistant", "", "yes"],
                     ["error", "error", "it broke"]]  # fmt: skip
    answer("<html>a proxy's page</html>", 502)
    page.type("#text", "again", "Enter")
    page.until("document.querySelectorAll('.error').length === 2")
    assert "status 502" in page.js("document.querySelectorAll('.error')[1].textContent")


def test_a_phone(page):
    """At 360 pixels nothing is cut off, and there is room to write."""
    page.do("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=2, mobile=True)
    try:
        page.type("#temperature", "0")
        page.type("#max_completion_tokens", "30")
        page.type("#text", "the weather " * 20, "Enter")
        page.until("document.querySelector('.assistant') && !document.querySelector('#send').disabled")
        assert page.js("document.documentElement.scrollWidth") <= 360
        assert page.js("document.querySelector('#text').clientWidth") > 280
        inside = "(r => r.left >= 0 && r.right <= 360 && r.width > 40)(x.getBoundingClientRect()) || !x.offsetParent"
        assert page.js(f"[...document.querySelectorAll('button, input, select, textarea')].every(x => {inside})")
    finally:
        page.do("Emulation.clearDeviceMetricsOverride")


# ---- images and recordings -----------------------------------------------------------------------------------------


def choose(page, model: str) -> None:
    """Load the page anew, and choose a model."""
    page.reload()
    page.until(f"[...document.querySelectorAll('option')].some(o => o.value === '{model}')")
    page.js(f"document.querySelector('#model').value = '{model}'")
    page.js("document.querySelector('#model').dispatchEvent(new Event('change'))")


@pytest.fixture(scope="module")
def seeing():
    """A server's model that sees."""
    import jax

    from fdel import models, params, text
    from fdel.media import clip, sight
    from fdel.serve.engine.engine import Engine, Settings
    from fdel.serve.server.served import served_model
    from tests.serve import seer, small, wire

    tok = text.train_bpe(wire.WORDS, small.VOCAB - 10, ["<image>"])
    token = tok.backend.token_to_id("<image>")
    shown = "{{ '<image>' if p.type == 'image' else p.text }}"
    template = "{% for m in messages %}{% for p in m.content %}" + shown + "{% endfor %}{% endfor %}"
    tok = text.Tokenizer(**{**vars(tok), "templates": {"default": template}, "eos_ids": (small.EOS,)})
    sees = sight.Sight("seer", "clip_vision_model", token, (token,), clip.Settings(token, 2, size=(12, 12)))
    made = jax.jit(lambda key: params.unstack(params.init(seer.spec(small.CFG), key)))(jax.random.key(0))
    shape = Settings(rows=2, pages=16, budget=64, batches=(2,), max_length=small.CONTEXT)
    engine = Engine(models.Model(seer, small.CFG, made), shape, tokenizer=tok, sight=sees)
    engine.start(wait=True)
    yield served_model(engine, "seer")
    engine.close()


@pytest.mark.matrix
def test_images_are_chosen_and_pasted(page, running, seeing, tmp_path):
    """They go along with the message, in order, and stay in the talk; where the model reads text alone, none is offered."""
    pytest.importorskip("PIL.Image", reason="needs the media extra").new("RGB", (9, 7), "red").save(tmp_path / "a.png")
    assert page.js("document.querySelector('#pick').hidden && document.querySelector('#record').hidden")
    with also(running, seeing):
        choose(page, "seer")
        page.until("!document.querySelector('#pick').hidden")
        root = page.do("DOM.getDocument")["root"]["nodeId"]
        node = page.do("DOM.querySelector", nodeId=root, selector="#file")["nodeId"]
        page.do("DOM.setFileInputFiles", nodeId=node, files=[str(tmp_path / "a.png")] * 2)
        page.until("document.querySelectorAll('#shown img').length === 2")
        page.js("""(async () => { const made = new OffscreenCanvas(4, 6); made.getContext('2d').fillRect(0, 0, 2, 2);
          const data = new DataTransfer(), blob = await made.convertToBlob();
          data.items.add(new File([blob], 'b.png', { type: 'image/png' }));
          document.querySelector('#text').dispatchEvent(
            new ClipboardEvent('paste', { clipboardData: data, bubbles: true, cancelable: true })) })()""")
        page.until("document.querySelectorAll('#shown img').length === 3")
        page.click("#shown img")  # the first is left out
        page.until("document.querySelectorAll('#shown img').length === 2")
        page.type("#temperature", "0")
        page.type("#max_completion_tokens", "8")
        page.type("#text", "the weather", "Enter")
        page.until("document.querySelector('.assistant') && !document.querySelector('#send').disabled")
        (sent,) = [json.loads(r["postData"]) for r in page.requests() if r["url"].endswith("/chat/completions")]
        content = sent["messages"][0]["content"]
        assert [p["type"] for p in content] == ["image_url", "image_url", "text"] and sent["model"] == "seer"
        assert all(p["image_url"]["url"].startswith("data:image/png;base64,") for p in content[:2])
        assert content[0] != content[1]
        assert page.js("[...document.querySelectorAll('.user img')].map(i => i.naturalWidth).join()") == "9,4"
        assert page.js("document.querySelectorAll('#shown img').length") == 0 and last(page) and page.errors() == []
        (answer,) = [call(running, "POST", "/v1/chat/completions", {**sent, "stream": False, "stream_options": None})]
        assert answer[1]["usage"]["prompt_tokens"] > 72  # of two pictures of 36 patches
        page.js("document.querySelector('#model').value = 'small'")
        page.js("document.querySelector('#model').dispatchEvent(new Event('change'))")
        assert page.js("document.querySelector('#pick').hidden")


def test_a_recording_is_written_down(page, running, hearing):
    """To a model that hears it is a message, and its transcript the answer; to another it is dictation."""
    import base64
    import io
    import wave

    running.state.metrics.extend("model", "ear")
    running.state.heard = {"ear": hearing.model}
    try:
        choose(page, "ear")
        page.until("!document.querySelector('#record').hidden && document.querySelector('#pick').hidden")
        page.js("""(fetch => { window.fetch = (url, options) => {
            if (options && options.body instanceof FormData) window.sent = options.body;
            return fetch(url, options) } })(window.fetch)""")
        for model, done in (("ear", "document.querySelector('.assistant')"), ("small", "true")):
            page.js(f"window.sent = null, document.querySelector('#model').value = '{model}', 0")
            page.click("#record")
            page.until("document.querySelector('#record').textContent === 'Finish'")
            time.sleep(0.7)
            page.click("#record")
            page.until(f"window.sent && !document.querySelector('#record').disabled && {done}")
            page.until("document.querySelector('#record').textContent === 'Record'")
        assert page.js("window.sent.get('model')") == "ear" and page.errors() == []
        raw = base64.b64decode(
            page.js("""new Promise(done => { const reader = new FileReader();
            reader.onload = () => done(reader.result.split(',')[1]); reader.readAsDataURL(window.sent.get('file')) })""")
        )
        with wave.open(io.BytesIO(raw)) as file:
            assert file.getparams()[:3] == (1, 2, 16000) and 0.3 < file.getnframes() / 16000 < 5
            assert any(file.readframes(2**20))
        kinds = page.js("[...document.querySelectorAll('#talk > div')].map(x => x.dataset.kind).join()")
        assert kinds == "recording,transcript"
        form = b"".join(b'--b\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n' % x for x in (
            (b"model", b"", b"ear"), (b"file", b'; filename="a.wav"', raw))) + b"--b--\r\n"  # fmt: skip
        headers = {"Content-Type": "multipart/form-data; boundary=b"}
        status, said, _ = call(running, "POST", "/v1/audio/transcriptions", form, role="service", headers=headers)
        assert status == 200 and page.js("document.querySelector('#text').value") == said["text"].strip()
    finally:
        running.state.heard = {}
        running.state.metrics.remove("model", "ear")
