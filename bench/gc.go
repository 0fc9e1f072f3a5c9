// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"time"

	"github.com/stormguard-mq/stormguard/internal/ringbuf"
)

// What the garbage collector has to do for held messages is measured in a
// process that does nothing else: in this one, a collection also looks at what
// the other cases and their libraries keep, several times as much work.

// gcEnv, if set, makes the process a holder: "slabs 1048576".
const gcEnv = "STORMGUARD_BENCH_HOLD"

// runHolder is the process of a holder. It fills a ring, says so in a line, and
// then answers each number of collections on in with the nanoseconds of the
// median one, until in ends.
func runHolder(spec string, in io.Reader, out io.Writer) error {
	var kind string
	var held int
	if _, err := fmt.Sscan(spec, &kind, &held); err != nil {
		return fmt.Errorf("%s is %q, want a kind and a number: %w", gcEnv, spec, err)
	}
	r, err := fill(kind, held)
	if err != nil {
		return err
	}
	// What filling left behind goes back to the system first, or the collections
	// would be measured together with the scavenger, which does that bit by bit.
	debug.FreeOSMemory()
	collect(3)
	fmt.Fprintln(out, r.Stats().Count)
	for {
		var n int
		if _, err := fmt.Fscan(in, &n); err != nil {
			if errors.Is(err, io.EOF) {
				return r.Close()
			}
			return err
		}
		fmt.Fprintln(out, collect(n))
	}
}

func fill(kind string, held int) (r *ringbuf.Ring[record], err error) {
	cfg := ringbuf.Config{MaxCount: held, MaxBytes: int64(held) * 1024}
	switch kind {
	case "slabs":
		r, err = ringbuf.NewSlabRing(cfg, recordCodec{})
	case "pointers":
		r, err = ringbuf.NewRing[record](cfg, nil)
	case "nothing":
		r, err = ringbuf.NewRing[record](cfg, nil)
		held = 0
	default:
		err = fmt.Errorf("no way to hold messages is called %q", kind)
	}
	if err != nil {
		return nil, err
	}
	l := r.Lane(0)
	for i := range held {
		if _, err := l.TryPut(newRecord(i)); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// collect returns the nanoseconds of the median of n whole collections, each
// from its start to the end of its sweep.
func collect(n int) int64 {
	took := make([]float64, n)
	for i := range took {
		start := time.Now()
		runtime.GC()
		took[i] = float64(time.Since(start))
	}
	return int64(median(took))
}

// openHeld holds messages in a process of its own, during its own turns only.
func openHeld(kind string, held int) func(context.Context) (Runner, error) {
	return func(context.Context) (Runner, error) {
		self, err := os.Executable()
		if err != nil {
			return Runner{}, err
		}
		var (
			cmd   *exec.Cmd
			in    io.WriteCloser
			out   *bufio.Reader
			cycle int64
		)
		return Runner{
			Before: func(ctx context.Context, _ int) error {
				cmd = exec.CommandContext(ctx, self)
				cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %d", gcEnv, kind, held))
				cmd.Stderr = os.Stderr
				var err error
				if in, err = cmd.StdinPipe(); err != nil {
					return err
				}
				stdout, err := cmd.StdoutPipe()
				if err != nil {
					return err
				}
				out = bufio.NewReader(stdout)
				if err := cmd.Start(); err != nil {
					return err
				}
				var ready int
				if _, err := fmt.Fscanln(out, &ready); err != nil {
					return errors.Join(fmt.Errorf("a process that holds %s: %w", kind, err), cmd.Wait())
				}
				return nil
			},
			Do: func(_ context.Context, n int) error {
				fmt.Fprintln(in, n)
				_, err := fmt.Fscanln(out, &cycle)
				return err
			},
			Each: func() time.Duration { return time.Duration(cycle) },
			After: func(context.Context) error {
				return errors.Join(in.Close(), cmd.Wait())
			},
		}, nil
	}
}

// A record is a message as brokers have them: key, value and three headers.
type record struct {
	seq        uint64
	key, value []byte
	headers    [3]header
}

type header struct{ name, value string }

func newRecord(seq int) record {
	return record{
		seq: uint64(seq), key: make([]byte, 16), value: make([]byte, 256), headers: [3]header{
			{"traceparent", fmt.Sprintf("00-%032x-%016x-01", seq, seq)}, {"origin", fmt.Sprint(seq)}, {"kind", "order"},
		},
	}
}

type recordCodec struct{}

func (recordCodec) Append(dst []byte, v record) []byte {
	dst = binary.AppendUvarint(dst, v.seq)
	dst = appendField(dst, v.key)
	dst = appendField(dst, v.value)
	for _, h := range v.headers {
		dst = appendField(dst, h.name)
		dst = appendField(dst, h.value)
	}
	return dst
}

func appendField[T []byte | string](dst []byte, f T) []byte {
	return append(binary.AppendUvarint(dst, uint64(len(f))), f...)
}

func (recordCodec) Decode(src []byte) (v record, err error) {
	number := func() uint64 {
		n, k := binary.Uvarint(src)
		src = src[k:]
		return n
	}
	field := func() []byte {
		n := number()
		f := src[:n]
		src = src[n:]
		return f
	}
	v.seq, v.key, v.value = number(), field(), field()
	for i := range v.headers {
		v.headers[i] = header{string(field()), string(field())}
	}
	return v, nil
}
