// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package fleet

// A rendezvous order needs a hash that every process computes alike, in every
// version: FNV-1a over the parts, each followed by its length, and a finaliser
// that spreads the last byte over all bits (Stafford's thirteenth variant of
// MurmurHash3's).

const hashInit uint64 = 14695981039346656037

func hashString(h uint64, s string) uint64 {
	for i := range len(s) {
		h = (h ^ uint64(s[i])) * 1099511628211
	}
	return hashNumber(h, uint64(len(s)))
}

func hashNumber(h, n uint64) uint64 {
	for range 8 {
		h = (h ^ n&0xff) * 1099511628211
		n >>= 8
	}
	return h
}

func hashEnd(h uint64) uint64 {
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	return h ^ h>>31
}

// rank is where name stands in the order of a round; the lowest is first. Source:
// D. G. Thaler and C. V. Ravishankar, Using name-based mappings to increase hit
// rates, IEEE/ACM Trans. Netw. 6 (1998).
func rank(scope string, at Position, name string) uint64 {
	h := hashString(hashInit, scope)
	h = hashNumber(h, at.Gen)
	h = hashNumber(h, uint64(at.Round))
	return hashEnd(hashString(h, name))
}
