"""A hook of MkDocs: pages link to files outside of docs/, as they must where GitHub shows them.

Pictures of the benchmarks come along into the site. Links to other files lead to the repository.
A docstring names a page by its path (docs/sizes.md) and a public name by itself (`accumulate`),
which reads in `help()` too. Here they are links.
"""

import re
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).resolve().parents[1]


def on_files(files, config):
    for picture in sorted((ROOT / "benchmarks" / "results").glob("*.png")):
        name = f"results/{picture.name}"
        files.append(File.generated(config, name, abs_src_path=str(picture)))
    files.remove(files.get_file_from_path("pictures/draw.py"))
    return files


def on_page_markdown(markdown, page, config, files):
    markdown = re.sub(r"\]\(\.\./benchmarks/results/([\w-]+\.png)\)", r"](results/\1)", markdown)
    return re.sub(r"\]\(\.\./", f"]({config['repo_url']}/blob/main/", markdown)


def on_page_content(html, page, config, files):
    def link(found):
        other = files.get_file_from_path(f"{found[1]}.md")
        if other is None:
            raise PluginError(f"{page.file.src_uri} names {found[0]}, which is no page")
        return f'<a href="{get_relative_url(other.url, page.url)}">{other.page.title}</a>'

    html = re.sub(r"(?<![\w/])docs/([\w-]+)\.md", link, html)
    for name in re.findall(r'id="(macrobatch\.\w+)"', html):  # on the page of the API
        code = rf"(?<!<b>)(<code>(?:{re.escape(name)}|{name[11:]})</code>)"
        html = re.sub(code, rf'<a href="#{name}">\1</a>', html)
    return html
