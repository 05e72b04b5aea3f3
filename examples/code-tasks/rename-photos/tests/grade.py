"""Half each for small letters and for underscores, if all files are there and no other is."""

import os

import judge

NAMES = (
    "Beach 1.JPG", "Beach 2.JPG", "Old Town.jpg", "IMG_0042.JPG", "Lunch at Noon.Png", "two  blanks.jpg",
    "sunset.jpg", "Harbour-East.PNG", "My Cat (small).jpg", "ALL CAPS.JPEG",
)  # fmt: skip
FOLDER = "/app/photos"


def left():
    """The names in the folder, by what the file says its first name was."""
    names = os.listdir(FOLDER) if os.path.isdir(FOLDER) and not os.path.islink(FOLDER) else []
    return {judge.text(os.path.join(FOLDER, name), 1000): name for name in names}, len(names)


def underscored(name):
    return name.replace(" ", "_")


files, count = left()
found = [(name, files.get(f"photo {name}\n", "")) for name in NAMES]
whole = count == len(NAMES)
judge.finish(
    {
        "small_letters": whole and all(underscored(now) == underscored(name.lower()) for name, now in found),
        "underscores": whole and all(now.lower() == underscored(name.lower()) for name, now in found),
    }
)
