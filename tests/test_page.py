"""The server's page in a real browser."""

from __future__ import annotations

import json
import threading
import time

import pytest

from edgekv.chat.sampling import Sampling
from edgekv.commands.load import end_tokens
from edgekv.serve import extract, listening
from edgekv.serve.job import Job
from edgekv.serve.options import ServeOptions
from edgekv.serve.router.options import RouterOptions
from edgekv.serve.router.run import RouterServer
from tests.engine import load
from tests.serving import PATIENCE, serving, until
from tests.test_pack import pdf_of

pytest.importorskip("websockets")
from tests import browser  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.browser() is None, reason="no browser is here"),
]
ANSWER = "[...document.querySelectorAll('article:not(.user)')].at(-1)"
IS_DONE = "document.querySelector('#send').textContent === 'Send'"
CACHE = dict(kv_ratio=0.3, kv_method="snapkv", kv_min_tokens=64)
RAIN = b"the rain in the air is an art "
N_ARTICLES = "document.querySelectorAll('article').length"
FILES = "[...document.querySelectorAll('#files button')].map((one) => one.textContent).join()"
REFUSED = "document.querySelector('#files .wrong')?.textContent"
STATE = "document.querySelector('#state').textContent"
TEXT = "document.querySelector('#text').value"


@pytest.fixture(scope="module")
def endless(tiny) -> Sampling:
    """Answers go on to their limit."""
    with load(tiny("llama-gqa")) as llm:
        ends = end_tokens(llm)
    return Sampling(temperature=0, logit_bias=dict.fromkeys(ends, float("-inf")))


def test_a_message_is_answered_looked_at_and_stopped(tiny, endless, tmp_path):
    (tmp_path / "rain.txt").write_text("the rain in the air is an art " * 40)
    options = ServeOptions(sampling=endless, max_tokens=12)
    with serving(tiny("llama-gqa"), options, **CACHE) as (url, server):
        with browser.opened(url, tmp_path / "browser") as page:
            page.until("document.title.endsWith('.gguf')")
            page.give_file("#pick", tmp_path / "rain.txt")
            page.until("document.querySelector('#files').textContent.includes('tokens')")
            page.click("#text")
            page.type("who is it?")
            page.press("Enter", 13)
            page.until(f"{IS_DONE} && document.querySelector('.cost meter')")
            assert "rain.txt" in page.value("document.querySelector('.user').textContent")
            assert page.value(f"{ANSWER}.querySelector(':scope > div').textContent.length > 0")
            assert "MiB" in page.value(f"{ANSWER}.querySelector('.cost').textContent")

            page.click(".look")
            page.until("document.querySelectorAll('.kept div b').length > 300")
            whole = page.value("document.querySelector('.kept div').textContent")
            assert "the rain in the air" in whole and "who is it?" in whole
            colours = "new Set([...document.querySelectorAll('.kept div b')].map("
            colours += "(one) => getComputedStyle(one).backgroundColor)).size"
            assert page.value(colours) > 3
            page.value(
                "{const s = document.querySelector('.kept select'); s.value = '1';"
                " s.dispatchEvent(new Event('change'))}"
            )
            page.until("document.querySelector('.kept').textContent.includes('by all 2 heads')")
            assert page.value("document.querySelector('.kept div').textContent") == whole
            assert page.faults == []


def ask(page, words):
    page.value(f"document.querySelector('#text').value = {json.dumps(words)}")
    page.click("#send")


def answered(page, n_articles=2):
    page.until(f"{IS_DONE} && {N_ARTICLES} === {n_articles}")


def reply_with(page, *deltas):
    """Answers of the page's server are these pieces."""
    chunks = [{"choices": [{"delta": delta}]} for delta in deltas]
    events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    page.value(
        "{const real = window.real ??= fetch; window.fetch = async (path, wish) => {"
        " if (!path.endsWith('/completions')) return real(path, wish);"
        f" const rest = {json.dumps(events)}, code = new TextEncoder();"
        " return new Response(new ReadableStream({async pull(out) {"
        " await new Promise(requestAnimationFrame);"
        " rest.length ? out.enqueue(code.encode(rest.shift())) : out.close(); }})); }}"
    )


def never_reply(page):
    page.value(
        "{const real = fetch; window.fetch = (path, wish) => path.endsWith('/completions') ?"
        " new Promise((_, no) => wish.signal.addEventListener('abort', () =>"
        " no(new DOMException('', 'AbortError')))) : real(path, wish)}"
    )


def listen(page):
    """The messages of each request for an answer are in `sent`."""
    page.value(
        "{const real = fetch; window.sent = []; window.fetch = (path, wish) => {"
        " if (path.endsWith('/completions')) sent.push(JSON.parse(wish.body).messages);"
        " return real(path, wish); }}"
    )


@pytest.fixture(scope="module")
def shared(tiny, endless):
    """A server for tests that leave nothing behind."""
    options = ServeOptions(sampling=endless, max_tokens=8)
    with serving(tiny("llama-gqa"), options, **CACHE) as (url, _):
        yield url


@pytest.fixture
def page(shared, tmp_path):
    with browser.opened(shared, tmp_path / "browser") as page:
        page.until("document.title.endsWith('.gguf')")
        yield page
        assert page.faults == []


# ---- files


def test_a_file_that_does_not_fit_is_refused_when_it_is_dropped(tiny, endless, tmp_path):
    options = ServeOptions(sampling=endless, max_tokens=8)
    with serving(tiny("llama-gqa"), options, n_ctx=512) as (url, _):
        with browser.opened(url, tmp_path) as page:
            page.until("document.title.endsWith('.gguf')")
            page.drop("long.txt", RAIN * 100)
            page.until(f"{REFUSED}?.includes('long.txt')")
            assert "context is 512" in page.value(REFUSED) and page.value(FILES) == ""
            page.drop("short.txt", RAIN * 12)
            page.until(f"{FILES}.includes('short.txt, ')")
            page.drop("other.txt", RAIN * 12)  # it would fit alone
            page.until(f"{REFUSED}?.includes('other.txt has')")
            assert "512" in page.value(REFUSED) and "other.txt" not in page.value(FILES)
            ask(page, "who is it?")
            answered(page)
            assert "short.txt" in page.value("document.querySelector('.user').textContent")
            page.drop("short.txt", RAIN * 12)  # the chat takes the room by now
            page.until(f"{REFUSED}?.includes('short.txt has')")
            page.click("#fresh")
            page.drop("short.txt", RAIN * 12)
            page.until(f"{FILES}.includes('short.txt, ')")


def test_files_are_read_as_packs_read_them(page):
    pytest.importorskip("pypdf")
    page.drop("report.pdf", pdf_of("the sun is on the ear"))
    page.drop("rain.html", b"<style>no</style><p>the <b>rain</b><script>no</script>")
    page.until(f"{FILES}.includes('rain.html, ') && {FILES}.includes('report.pdf, ')")
    listen(page)
    ask(page, "who is it?")
    answered(page)
    texts = [part["text"] for part in page.value("sent[0][0].content")]
    assert texts == ["the sun is on the ear", "the rain", "who is it?"]


def test_a_new_chat_has_no_files_of_the_old_one(page, monkeypatch):
    page.drop("rain.txt", RAIN)
    page.until(f"{FILES}.includes('tokens')")
    page.click("#fresh")
    assert page.value(FILES) == ""

    begun, ends = threading.Event(), threading.Event()

    def slow(data, what, kind):
        begun.set()
        ends.wait(PATIENCE)
        return "the rain"

    monkeypatch.setattr(extract, "text_of", slow)
    page.drop("late.txt", RAIN)
    begun.wait(PATIENCE)
    page.click("#send")
    assert "wait" in page.value(STATE), "a file that is not read cannot be asked about"
    page.click("#fresh")
    ends.set()
    page.drop("next.txt", RAIN)  # files are read one behind the other
    page.until(f"{FILES}.includes('next.txt, ')")
    assert "late.txt" not in page.value(FILES)

    never_reply(page)
    ask(page, "who is it?")
    page.until(f"{N_ARTICLES} === 2")
    page.click("#fresh")
    page.until(f"{IS_DONE} && {N_ARTICLES} === 0")
    time.sleep(0.1)
    assert page.value(FILES) == "" and page.value(TEXT) == ""


# ---- messages

MARKDOWN = {
    "a *b* **c** ***d*** ~~e~~ __f__": "<p>a <em>b</em> <strong>c</strong> "
    "<strong><em>d</em></strong> <s>e</s> <strong>f</strong></p>",
    "2 * 3 * 4, file_name_here, **open": "<p>2 * 3 * 4, file_name_here, **open</p>",
    "`<b>` and ``a`b``, \\*no\\*": "<p><code>&lt;b&gt;</code> and <code>a`b</code>, *no*</p>",
    "# One\n## Two ##\ntext": "<h1>One</h1><h2>Two ##</h2><p>text</p>",
    "a\nb\n\nc": "<p>a\nb</p><p>c</p>",
    "- a\n  - b\n- c\n\n1. d\n2. e": "<ul><li><p>a</p><ul><li><p>b</p></li></ul></li>"
    '<li><p>c</p></li></ul><ol start="1"><li><p>d</p></li><li><p>e</p></li></ol>',
    "> a\n> > b\n\n---": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><hr>",
    "|a|b|\n|-|:-:|\n|1|x \\| y|": '<div class="table"><table><tbody><tr><th>a</th><th>b</th></tr>'
    "<tr><td>1</td><td>x | y</td></tr></tbody></table></div>",
    "<img src=x onerror=alert(1)>": "<p>&lt;img src=x onerror=alert(1)&gt;</p>",
    "[a](javascript:alert(1)) ![b](data:,x)": "<p>[a](javascript:alert(1)) ![b](data:,x)</p>",
}


@pytest.mark.parametrize("source", MARKDOWN)
def test_an_answer_is_markdown(markdown_page, source):
    page = markdown_page
    page.click("#fresh")
    reply_with(page, *({"content": letter} for letter in source))
    ask(page, "abc")
    answered(page)
    assert page.value(f"{ANSWER}.querySelector('.answer').innerHTML") == MARKDOWN[source]
    assert page.faults == []


@pytest.fixture(scope="module")
def markdown_page(shared, tmp_path_factory):
    with browser.opened(shared, tmp_path_factory.mktemp("browser")) as page:
        page.until("document.title.endsWith('.gguf')")
        yield page


def test_links_lead_to_the_web_alone(markdown_page):
    page = markdown_page
    page.click("#fresh")
    reply_with(
        page, {"content": "[a *b*](https://x.org/a_(b)) https://y.org/c. ![d](http://z.org)"}
    )
    ask(page, "abc")
    answered(page)
    links = f"[...{ANSWER}.querySelectorAll('a')].map((a) => [a.textContent, a.href, a.rel])"
    rel = "noopener noreferrer"
    assert page.value(links) == [
        ["a b", "https://x.org/a_(b)", rel],
        ["https://y.org/c", "https://y.org/c", rel],
        ["d", "http://z.org/", rel],
    ]
    assert page.value(f"{ANSWER}.querySelector('img')") is None


@pytest.mark.parametrize(
    "piece", ["*a ", "**", "[", "`", "> ", "- a\n ", "|", "_a*", "(https://", "```\n"]
)
def test_no_text_keeps_the_page_busy(markdown_page, piece):
    page = markdown_page
    page.click("#fresh")
    text = piece * 20_000
    reply_with(page, {"content": text})
    begin = time.monotonic()
    ask(page, "abc")
    answered(page)
    assert time.monotonic() - begin < 20
    assert page.value(f"{ANSWER}.querySelector('.answer').innerHTML.length") > 0


COPIES = "navigator.clipboard.writeText = (words) => { window.copied = words; }"
OLD_COPIES = """
Object.defineProperty(navigator, "clipboard", { value: undefined });
document.addEventListener("copy", () => { window.copied = document.activeElement.value; });
"""


@pytest.mark.parametrize("how", [COPIES, OLD_COPIES], ids=["new", "without TLS"])
def test_code_and_messages_are_copied(page, how):
    page.value(how)
    reply_with(page, {"content": "So:\n```python\nx = "}, {"content": "1\n\ty\n```\n*Done.*"})
    ask(page, "who is it?")
    answered(page)
    assert page.value(f"{ANSWER}.querySelector('.bar').textContent").startswith("python")
    page.click(".bar button")
    assert page.value("copied") == "x = 1\n\ty"
    page.click("article:not(.user) .acts button[title^=Copy]")
    assert page.value("copied") == "So:\n```python\nx = 1\n\ty\n```\n*Done.*"
    page.click(".user .acts button[title^=Copy]")
    assert page.value("copied") == "who is it?"


def test_thoughts_are_folded(page):
    reply_with(
        page, {"reasoning_content": "Let me "}, {"reasoning_content": "*see*"}, {"content": "x"}
    )
    ask(page, "who is it?")
    answered(page)
    details = f"{ANSWER}.querySelector('details')"
    assert page.value(f"[{details}.open, {details}.hidden]") == [False, False]
    assert page.value(f"{details}.querySelector('div').textContent") == "Let me *see*"
    reply_with(page, {"content": "y"})
    ask(page, "again")
    answered(page, 4)
    assert page.value(f"{details}.hidden")


def test_an_answer_is_written_anew(page):
    listen(page)
    ask(page, "one")
    answered(page)
    ask(page, "two")
    answered(page, 4)
    page.value("document.querySelectorAll('article')[1].querySelector('[title^=Have]').click()")
    answered(page)
    assert page.value("sent.map((one) => one.length)") == [1, 3, 1]
    assert page.value("sent[2][0].content") == "one"
    never_reply(page)
    was = page.value("document.querySelector('#talk').textContent")
    page.click("[title^=Have]")
    page.until(f"!({IS_DONE})")
    page.press("Escape", 27)
    page.until(f"{IS_DONE} && document.querySelector('.note')")
    assert page.value("document.querySelector('#talk').textContent") == was + "stopped"


def test_a_message_is_edited(page):
    listen(page)
    page.drop("rain.txt", RAIN)
    page.until(f"{FILES}.includes('tokens')")
    ask(page, "one")
    answered(page)
    ask(page, "two")
    answered(page, 4)
    page.value("document.querySelector('#text').value = 'a draft'")
    edit = "document.querySelector('.user [title^=Ask]').click()"
    page.value(edit)
    assert page.value(TEXT) == "one" and "rain.txt" in page.value(FILES)
    assert page.value("document.querySelectorAll('.stale').length") == 4
    page.press("Escape", 27)
    assert page.value(TEXT) == "a draft" and page.value(FILES) == ""
    assert page.value("document.querySelectorAll('.stale').length") == 0

    page.value(edit)
    ask(page, "other words")
    answered(page)
    assert page.value(TEXT) == "a draft"
    (asked,) = page.value("sent[2]")
    assert [part["text"] for part in asked["content"]] == [RAIN.decode(), "other words"]

    never_reply(page)
    page.value(edit)
    ask(page, "third words")
    page.until(f"!({IS_DONE})")
    page.press("Escape", 27)
    page.until(f"{IS_DONE} && {TEXT} === 'third words'")  # nothing is lost
    assert page.value("document.querySelectorAll('.stale').length") == 2
    assert "other words" in page.value("document.querySelector('.user').textContent")


def test_an_answer_is_edited_and_goes_on(page, shared):
    for n, words in ((2, "one"), (4, "two")):
        ask(page, words)
        answered(page, n)
    page.value("document.querySelector('#text').value = 'a draft'")
    edit = "document.querySelector('article:not(.user) [title^=Change]').click()"
    page.value(edit)
    text = "document.querySelector('article:not(.user) .answer').textContent"
    assert page.value(TEXT) == page.value(text)
    assert page.value("document.querySelectorAll('.stale').length") == 3
    page.press("Escape", 27)
    assert page.value(TEXT) == "a draft" and page.value(IS_DONE)

    page.value(edit)
    assert page.value("document.querySelector('#send').textContent") == "Save"
    listen(page)
    page.drop("rain.txt", RAIN)
    page.until(f"{FILES}.includes('tokens')")
    ask(page, "the rain is")
    answered(page)
    assert page.value(text) == "the rain is" and page.value("sent.length") == 0
    assert page.value(TEXT) == "a draft" and "rain.txt" in page.value(FILES), "nothing is lost"
    page.open(shared)
    assert page.value(text) == "the rain is" and page.value(N_ARTICLES) == 2
    assert page.value(TEXT) == ""

    listen(page)
    page.click("[title='Have this answer go on']")
    answered(page)
    sent = page.value("sent[0].map((one) => [one.role, one.content])")
    assert sent == [["user", "one"], ["assistant", "the rain is"]]
    went_on = page.value(text)
    assert went_on.startswith("the rain is") and went_on.count("the rain is") == 1
    assert len(went_on) > len("the rain is")
    ask(page, "two")
    answered(page, 4)
    assert page.value("sent[1][1].content") == went_on, "the next question knows the new words"


def test_an_answer_that_does_not_go_on_stays(page):
    ask(page, "one")
    answered(page)
    was = page.value("document.querySelector('#talk').textContent")
    never_reply(page)
    page.click("[title='Have this answer go on']")
    page.until(f"!({IS_DONE})")
    page.press("Escape", 27)
    page.until(f"{IS_DONE} && document.querySelector('.note')")
    assert page.value("document.querySelector('#talk').textContent") == was + "stopped"


def test_another_answer_ends_the_editing(page):
    for n, words in ((2, "one"), (4, "two")):
        ask(page, words)
        answered(page, n)
    page.value("[...document.querySelectorAll('.user [title^=Ask]')].at(-1).click()")
    page.value("document.querySelector('[title^=Have]').click()")
    answered(page)
    assert page.value(TEXT) == ""
    listen(page)
    ask(page, "three")
    answered(page, 4)
    assert page.value("sent[0].map((one) => one.role)") == ["user", "assistant", "user"]


def test_a_system_prompt_is_sent_and_stays_for_new_chats(page, shared):
    page.value("document.querySelector('#system').open = true")
    page.click("#rules")
    page.type("Be brief.")
    for _ in range(2):
        listen(page)
        ask(page, "one")
        answered(page)
        assert page.value("sent[0][0]") == {"role": "system", "content": "Be brief."}
        page.open(shared)
        page.click("#fresh")
        assert page.value("document.querySelector('#rules').value") == "Be brief."


# ---- chats


def test_a_chat_is_there_after_a_reload_and_not_read_again(page, shared):
    page.drop("rain.txt", RAIN * 40)
    page.until(f"{FILES}.includes('tokens')")
    ask(page, "who is it?")
    answered(page)
    was = page.value("document.querySelector('#talk').textContent")
    page.open(shared)
    assert page.value("document.querySelector('#talk').textContent") == was
    page.click(".look")
    page.until("document.querySelectorAll('.kept div b').length > 300")
    listen(page)
    ask(page, "and then?")
    answered(page, 4)
    assert [len(one["content"]) for one in page.value("sent[0]")][0] == 2, "the file is sent again"
    n_read = page.value(
        f"{ANSWER}.querySelector('.cost').textContent.match(/(\\d+) tokens read/)[1]"
    )
    assert int(n_read) < 100


def test_a_reload_in_an_answer_loses_nothing(tiny, endless, slow_model, monkeypatch, tmp_path):
    with serving(tiny("llama-gqa"), ServeOptions(sampling=endless)) as (url, server):
        with browser.opened(url, tmp_path) as page:
            ask(page, "abc")
            page.until(f"{ANSWER}?.querySelector(':scope > div').textContent.length > 3")
            page.open(url)
            assert page.value(f"{ANSWER}.textContent").endswith("stopped")
            monkeypatch.setattr(Job, "step", lambda *_: time.sleep(0.5) or True)
            ask(page, "def")
            page.until(f"{N_ARTICLES} === 4")
            page.open(url)
            assert page.value(N_ARTICLES) == 2 and page.value(TEXT) == "def"
            assert page.faults == []


def test_chats_are_opened_and_deleted(page):
    names = "[...document.querySelectorAll('.name')].map((one) => one.textContent)"
    for words in ("one", "two", "three"):
        page.click("#fresh")
        ask(page, words)
        answered(page)
    page.click("#list")
    assert page.value(names) == ["three", "two", "one"]
    page.click("#chats .name")
    assert page.value("document.querySelector('.user > div').textContent") == "one"
    never_reply(page)
    ask(page, "four")
    page.click("#list")
    page.click("#chats li:first-child .name")  # the one that is shown goes on
    assert not page.value(IS_DONE)
    page.press("Escape", 27)
    page.until(IS_DONE)
    page.click("#list")
    page.click("#chats li:last-child button:last-child")
    assert page.value(names) == ["one", "three"] and page.value(N_ARTICLES) == 2
    page.click("#chats li:first-child button:last-child")  # the one that is shown
    assert page.value(names) == ["three"] and page.value(N_ARTICLES) == 0
    page.value("window.confirm = () => false")
    page.click("#all")
    assert page.value(names) == ["three"]
    page.value("window.confirm = () => true")
    page.click("#all")
    assert page.value(names) == [] and page.value("localStorage.length") == 0


def test_the_oldest_chats_make_room(page):
    page.value(
        "for (let i = 0; i < 4; ++i) { const text = 'x'.repeat(980000), id = `old${i}`;"
        " localStorage.setItem(`edgekv.chat.${id}`, JSON.stringify({id, changed: i, system: '',"
        " messages: [{role: 'user', text, files: []}]})); }"
    )
    page.value("document.querySelector('#text').value = 'x'.repeat(1200)")
    reply_with(page, {"content": "x" * 200_000})
    page.click("#send")
    answered(page)
    kept = "Object.keys(localStorage).filter((key) => key.startsWith('edgekv.chat.old')).sort()"
    assert page.value(kept) == [f"edgekv.chat.old{i}" for i in (1, 2, 3)]
    assert page.value("Object.keys(localStorage).length") == 4
    reply_with(page, {"content": "x" * 1_000_000})
    ask(page, "more")
    answered(page, 4)
    assert "too large to be kept" in page.value(STATE)
    assert page.value(kept) == [f"edgekv.chat.old{i}" for i in (1, 2, 3)]


def test_a_browser_may_keep_nothing(shared, tmp_path):
    forbid = "Object.defineProperty(window, %r, {get() { throw new DOMException('no'); }});"
    script = forbid % "localStorage" + forbid % "sessionStorage"
    with browser.opened("about:blank", tmp_path) as page:
        page.call("Page.addScriptToEvaluateOnNewDocument", source=script)
        page.open(shared)
        ask(page, "one")
        answered(page)
        page.click("#list")
        assert page.value("document.querySelectorAll('.name').length") == 1
        assert page.faults == []


# ---- how an answer ends


@pytest.fixture
def slow_model(monkeypatch):
    """A tiny model fills its window in a second: before a busy machine's browser has clicked."""
    step = Job.step

    def slowly(job: Job, is_current: bool) -> bool:
        time.sleep(0.03)
        return step(job, is_current)

    monkeypatch.setattr(Job, "step", slowly)


@pytest.mark.parametrize("how", ["button", "key"])
def test_an_answer_is_stopped(tiny, endless, slow_model, tmp_path, how):
    with serving(tiny("llama-gqa"), ServeOptions(sampling=endless)) as (url, server):
        with browser.opened(url, tmp_path) as page:
            page.click("#text")
            page.type("abc")
            page.click("#send")
            page.until(f"{ANSWER}?.querySelector(':scope > div').textContent.length > 3")
            assert page.value("document.querySelector('#send').textContent") == "Stop"
            assert page.value("document.querySelector('.look')") is None
            if how == "button":
                page.click("#send")
            else:
                page.press("Escape", 27)
            page.until(f"{IS_DONE} && {ANSWER}.textContent.endsWith('stopped')")
            until(lambda: not server.worker.active())
            page.type("def")
            page.press("Enter", 13)  # the next message is answered
            page.until("document.querySelectorAll('article').length === 4")
            page.click("#fresh")
            page.until(f"{IS_DONE} && document.querySelectorAll('article').length === 0")
            assert page.faults == []


def test_a_key_is_asked_for(tiny, endless, tmp_path):
    options = ServeOptions(api_keys=("secret",), sampling=endless, max_tokens=4)
    with serving(tiny("llama-gqa"), options) as (url, _), browser.opened(url, tmp_path) as page:
        page.click("#text")
        page.type("abc")
        page.press("Enter", 13)
        page.until("!document.querySelector('#lock').hidden")
        page.until(IS_DONE)
        assert page.value("document.querySelector('#text').value") == "abc", "nothing is lost"
        page.click("#key")
        page.type("secret")
        page.click("#enter")
        page.click("#send")
        page.until(f"{IS_DONE} && {ANSWER}.querySelector('.cost')")
        assert page.value("document.querySelector('#lock').hidden")


def test_a_server_of_many_models_has_a_list_of_them(tiny, tmp_path):
    (tmp_path / "models").mkdir()
    for name in ("one", "two"):
        (tmp_path / "models" / f"{name}.gguf").hardlink_to(tiny("llama-gqa"))
    router = RouterOptions(models_dir=str(tmp_path / "models"))
    server = RouterServer(ServeOptions(), router, (), False)
    opened = listening.listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([opened],))
    thread.start()
    try:
        url = f"http://127.0.0.1:{opened.getsockname()[1]}"
        with browser.opened(url, tmp_path / "browser") as page:
            page.until("document.title === 'one'")
            page.value("which.value = 'two'; which.onchange()")
            page.value("location.reload()")
            page.until("document.title === 'two'")
            assert page.faults == []
    finally:
        server.should_exit = True
        thread.join()
