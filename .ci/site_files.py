"""A hook of MkDocs: pages link to files outside of docs/, as they must where GitHub shows them.

Pictures of the benchmarks come along into the site. Links to other files lead to the repository.
"""

import re
from pathlib import Path

from mkdocs.structure.files import File

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
