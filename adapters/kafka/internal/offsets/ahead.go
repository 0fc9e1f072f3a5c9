// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package offsets

import (
	"encoding/base64"
	"strings"
)

// MaxAhead is how far after the committed offset messages may be settled: each offset takes one
// bit of metadata. A broker accepts 4096 bytes of metadata by default.
const MaxAhead = 4096

// prefix begins all metadata of this package.
const prefix = "stormguard/1:"

// Ours tells by its metadata whether an offset was committed with [Encode]. Offsets of retry
// topics are, and no offset of a topic that the group subscribes to is.
func Ours(meta string) bool { return strings.HasPrefix(meta, prefix) }

// MaxMetadata is the length of the longest metadata, in bytes.
var MaxMetadata = int64(len(prefix) + base64.RawStdEncoding.EncodedLen(MaxAhead/8))

// Encode makes the metadata for the offsets that are settled after at. ahead must ascend.
func Encode(at int64, ahead []int64) string {
	if len(ahead) == 0 {
		return prefix
	}
	bits := make([]byte, (ahead[len(ahead)-1]-at)/8+1)
	for _, offset := range ahead {
		bits[(offset-at)/8] |= 1 << ((offset - at) % 8)
	}
	return prefix + base64.RawStdEncoding.EncodeToString(bits)
}

// Decode is the inverse of [Encode]; nil if the metadata is not ours.
func Decode(at int64, meta string) map[int64]bool {
	text, ours := strings.CutPrefix(meta, prefix)
	bits, err := base64.RawStdEncoding.DecodeString(text)
	if !ours || err != nil || len(bits) > MaxAhead/8+1 {
		return nil
	}
	ahead := make(map[int64]bool)
	for i, b := range bits {
		for j := range 8 {
			if b&(1<<j) != 0 {
				ahead[at+int64(8*i+j)] = true
			}
		}
	}
	return ahead
}
