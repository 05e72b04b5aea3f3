# The greatest weight in kg at which a parcel may travel.
LIMITS = {
    "anvil": 55,
    "barrel": 55,
    "candle": 56,
    "drum": 22,
    "easel": 30,
    "funnel": 50,
    "goblet": 54,
    "hammock": 45,
    "inkwell": 69,
    "jug": 32,
}
