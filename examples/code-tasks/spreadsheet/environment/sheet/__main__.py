import csv
import sys

from sheet.evaluate import values

csv.writer(sys.stdout, lineterminator="\n").writerows(values(list(csv.reader(sys.stdin))))
