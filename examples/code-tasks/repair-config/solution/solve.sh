#!/bin/sh
set -eu
cat > /app/config.json <<'END'
{
  "name": "corner shop",
  "currency": "EUR",
  "port": 8080,
  "debug": false,
  "tax_rate": 0.19,
  "logo": null,
  "home": "http://shop.example//start",
  "tags": ["bread", "milk", "tea"],
  "opening": {
    "monday": "08:00-18:00",
    "sunday": null
  },
  "limits": {
    "items": 250,
    "weights": [0.5, 1, 2.5]
  },
  "motto": "fresh, 'fair' and \"near\""
}
END
