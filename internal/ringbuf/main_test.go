// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package ringbuf_test

import (
	"encoding/binary"
	"errors"
	"testing"

	"go.uber.org/goleak"

	"github.com/stormguard-mq/stormguard/internal/ringbuf"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// msg is a message of the tests: who made it, its number there, and padding.
type msg struct {
	from, seq uint32
	pad       int
}

const msgSize = 8

func sizeOf(m msg) int { return msgSize + m.pad }

var errShort = errors.New("short")

type msgCodec struct{}

func (msgCodec) Append(dst []byte, m msg) []byte {
	dst = binary.LittleEndian.AppendUint32(dst, m.from)
	dst = binary.LittleEndian.AppendUint32(dst, m.seq)
	for range m.pad {
		dst = append(dst, byte(m.seq))
	}
	return dst
}

func (msgCodec) Decode(src []byte) (msg, error) {
	if len(src) < msgSize {
		return msg{}, errShort
	}
	m := msg{from: binary.LittleEndian.Uint32(src), seq: binary.LittleEndian.Uint32(src[4:]), pad: len(src) - msgSize}
	for _, b := range src[msgSize:] {
		if b != byte(m.seq) {
			return m, errors.New("padding changed")
		}
	}
	return m, nil
}

// kinds are the rings that every behaviour is tested on.
var kinds = map[string]func(ringbuf.Config) (*ringbuf.Ring[msg], error){
	"slots": func(c ringbuf.Config) (*ringbuf.Ring[msg], error) { return ringbuf.NewRing(c, sizeOf) },
	"slab":  func(c ringbuf.Config) (*ringbuf.Ring[msg], error) { return ringbuf.NewSlabRing(c, msgCodec{}) },
}

func eachKind(t *testing.T, cfg ringbuf.Config, f func(*testing.T, *ringbuf.Ring[msg])) {
	for name, open := range kinds {
		t.Run(name, func(t *testing.T) {
			r, err := open(cfg)
			if err != nil {
				t.Fatal(err)
			}
			f(t, r)
		})
	}
}
