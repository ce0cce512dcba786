"""Pictures of a report for the documentation.

The command is python tests/screenshots.py PAGE FOLDER [NAME] [SECTION].

Of a section of the page, the routing by default, as wide as a desk's screen and as a phone's. Needs
Chromium, its driver and selenium.
"""

import shutil
import sys
from io import BytesIO
from pathlib import Path

from PIL import Image
from selenium import webdriver

SIZES = {"wide": (1100, 2400), "phone": (390, 2400)}


def main(page: Path, folder: Path, report: str = "report", section: str = "routing") -> None:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    driver = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(shutil.which("chromedriver"))
    )
    for name, (width, height) in SIZES.items():
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.get(page.absolute().as_uri())
        driver.execute_async_script("window.drawn.then(() => arguments[0]())")
        driver.execute_script(f"document.getElementById('{section}').scrollIntoView()")
        picture = Image.open(BytesIO(driver.get_screenshot_as_png())).convert("RGB")
        picture.quantize(256, Image.Quantize.FASTOCTREE).save(
            folder / f"{report}_{name}.png", optimize=True
        )
    driver.quit()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
