"""Opens each page of the built site in a real browser without a window: `make test-docs`.

    python .ci/test_site.py build/site [--screenshots FOLDER]

Checks, from files as a reader without a server has them: links and their anchors lead somewhere,
pictures load, the console has no error, each page is readable at a small width and in dark mode.
Docstrings must come out as their authors meant them: sections, signatures, links to other pages.
"""

import argparse
import html
import html.parser
import json
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
from pathlib import Path

BROWSERS = ["chromium", "chromium-browser", "google-chrome"]
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
]
# Runs in each page; its answer is read from the document that the browser prints.
PROBE = r"""<script>window.addEventListener("load", () => setTimeout(() => {
  const all = selector => [...document.querySelectorAll(selector)];
  const longest = text => text.split("\n").sort((a, b) => b.length - a.length)[0];
  const texts = elements => elements.map(each => each.textContent.trim().slice(0, 80));
  const heading = /^\s*(Args|Attributes|Examples?|Notes?|Raises|Returns|Yields):?\s*(\n|$)/;
  const whole = title => title.closest("p").nextElementSibling.children.length == 1;
  const found = {
    "pictures that do not load": [...document.images].filter(i => !i.naturalWidth).map(i => i.src),
    "headings of docstrings that are mere text": texts(
      all(".doc-contents p, .doc-contents blockquote, .doc-contents summary").filter(
        each => !each.querySelector(".doc-section-title") && heading.test(each.textContent))),
    "quotes, which no docstring has": texts(all(".doc-contents blockquote")),
    "results in pieces": texts(all(".doc-section-title").filter(
      each => /Returns|Yields/.test(each.textContent) && !whole(each)).map(
      each => each.closest("p").nextElementSibling)),
    "pages that are named and not linked": document.querySelector(".md-content").innerText.match(
      /\bdocs\/[\w-]+\.md/g) || [],
    "code wider than its box": window.innerWidth < 1280 ? [] :
      all(".doc-signature code, .doc-contents pre code").filter(
        each => each.scrollWidth > each.clientWidth).map(each => longest(each.textContent)),
    "signatures": all(".doc-signature").length,
    "width": document.documentElement.scrollWidth, "window": window.innerWidth,
    "text": getComputedStyle(document.querySelector(".md-content p")).color,
    "ground": getComputedStyle(document.body).backgroundColor,
  };
  const query = document.querySelector("[data-md-component=search-query]");
  query.focus();
  query.value = "accumulate";
  query.dispatchEvent(new KeyboardEvent("keyup", {key: "e", bubbles: true}));
  setTimeout(() => {
    found["search"] = document.querySelectorAll(".md-search-result__item").length;
    document.body.setAttribute("data-found", JSON.stringify(found));
  }, 1500);
}, 300));</script>"""


class Links(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.targets, self.anchors = [], set()
        self.sources = set()  # what a page loads by itself

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.anchors.update(attributes[key] for key in ("id", "name") if attributes.get(key))
        for key in ("href", "src"):
            if attributes.get(key):
                self.targets.append(attributes[key])
                if key == "src":
                    self.sources.add(attributes[key])


def read(page):
    links = Links()
    links.feed(page.read_text())
    return links


def broken_links(site):
    pages = {page: read(page) for page in site.rglob("*.html")}
    for page, links in pages.items():
        if page.name == "404.html":
            continue  # made for a server: its links are absolute
        for target in links.targets:
            parts = urllib.parse.urlsplit(target)
            if parts.scheme or target.startswith("//"):
                if target in links.sources:
                    yield f"{page.name}: taken from another host: {target}"
                continue
            path = urllib.parse.unquote(parts.path)
            file = (page.parent / path).resolve() if path else page
            if not file.exists():
                yield f"{page.name}: no such file: {target}"
            elif parts.fragment and file in pages:
                anchor = urllib.parse.unquote(parts.fragment)
                if anchor not in pages[file].anchors and not anchor.startswith("__"):
                    yield f"{page.name}: no such place: {target}"


def browse(browser, page, *flags):
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, *FLAGS, f"--user-data-dir={profile}", *flags, page.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)


def brightness(colour):
    red, green, blue = (float(number) for number in re.findall(r"[\d.]+", colour)[:3])
    return 0.3 * red + 0.6 * green + 0.1 * blue


def faults(browser, page, width, dark):
    flags = [f"--window-size={width},900", "--virtual-time-budget=6000", "--dump-dom"]
    flags += ["--blink-settings=preferredColorScheme=0"] if dark else []
    result = browse(browser, page, *flags)
    for line in re.findall(r'CONSOLE.*?\] "(.*?)", source', result.stderr):
        if re.search("error|failed|refused|not allowed", line, re.I):
            yield f"console: {line}"
    answer = re.search(r'data-found="([^"]+)"', result.stdout)
    if not answer:
        yield f"the page did not answer: {result.stderr[-500:]}"
        return
    found = json.loads(html.unescape(answer.group(1)))
    for what, where in found.items():
        if where and isinstance(where, list):
            yield f"{what}: {where}"
    if page.name == "api.html" and not found["signatures"]:
        yield "no name of the package is on it"
    if found["width"] > found["window"]:
        yield f"{found['width']} pixels wide in a window of {found['window']}"
    if abs(brightness(found["text"]) - brightness(found["ground"])) < 100:
        yield f"text {found['text']} on {found['ground']}"
    if dark != (brightness(found["ground"]) < 100):
        yield f"dark mode is {dark}, and the ground is {found['ground']}"
    if not found["search"]:
        yield "the search finds nothing without a server"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("--screenshots", type=Path, help="a folder for pictures of some pages")
    arguments = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        line = "*" * 76
        print(line, "The site was NOT TESTED: no chromium found here.", sep="\n", file=sys.stderr)
        print("To test it, install one: apt-get install chromium", line, sep="\n", file=sys.stderr)
        return
    wrong = list(broken_links(arguments.site.resolve()))
    with tempfile.TemporaryDirectory() as folder:
        site = Path(shutil.copytree(arguments.site, Path(folder) / "site"))
        pages = sorted(page for page in site.glob("*.html") if page.name != "404.html")
        for page in pages:
            page.write_text(page.read_text().replace("</body>", PROBE + "</body>"))
            for width, dark in ((1280, False), (500, True)):
                where = f"{page.name}, {width} pixels, {'dark' if dark else 'light'}"
                wrong += [f"{where}: {each}" for each in faults(browser, page, width, dark)]
            if arguments.screenshots:
                arguments.screenshots.mkdir(parents=True, exist_ok=True)
                for width, dark in ((1280, False), (500, True)):
                    output = arguments.screenshots.resolve() / f"{page.stem}-{width}.png"
                    mode = ["--blink-settings=preferredColorScheme=0"] if dark else []
                    size = f"--window-size={width},1400"
                    browse(browser, page, f"--screenshot={output}", size, *mode)
    print(*wrong, sep="\n")
    print(f"{len(pages)} pages, {len(wrong)} faults")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
