// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package spill

import (
	"bytes"
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

var contextBackground = context.Background()

// child runs this test binary again; it is skipped if the child says that it cannot work here.
func child(t *testing.T, args ...any) string {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"="+strings.TrimSpace(fmt.Sprintln(args...)))
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if strings.Contains(stderr.String(), "LEFT OUT") {
		t.Skip("needs a Linux kernel that lets a process watch its own system calls (seccomp): " + stderr.String())
	}
	if err != nil {
		t.Fatalf("%v: %v\n%s%s", args, err, out, stderr.String())
	}
	return string(out)
}

// Each call that writes, syncs, renames or makes a directory fails, one after the other:
// once, and from then on. STORMGUARD_FULL=1 has all, the short form every fifth.
func TestEveryCallFails(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"EIO", "EIO+", "ENOSPC", "ENOSPC+"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			dir := fastTemp(t)
			var n int
			out := child(t, "faults", dir, kind, 1, stride(5))
			if _, err := fmt.Sscanf(out, "faults %d", &n); err != nil || n < 60/stride(5) {
				t.Fatalf("%q, %v: want at least %d", out, err, 60/stride(5))
			}
			t.Logf("%d calls failed", n)
		})
	}
}

// traceChild does the script and writes down what the disk was told meanwhile.
func traceChild() error {
	var dir string
	if _, err := fmt.Sscan(strings.TrimPrefix(os.Getenv(childEnv), "trace "), &dir); err != nil {
		return err
	}
	t, err := openTap()
	if err != nil {
		return fmt.Errorf("LEFT OUT: %w", err)
	}
	s, _, err := Open(Config{Dir: filepath.Join(dir, "spill")}, text{})
	if err != nil {
		return err
	}
	path := filepath.Join(dir, "spill", fileName)
	base, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var mu sync.Mutex
	var events []event
	add := func(e event) {
		mu.Lock()
		events = append(events, e)
		mu.Unlock()
	}
	if err := t.record(path, add); err != nil {
		return err
	}
	seq := map[string]int{}
	errs := script(s, seq, 300, func(kind byte, lane string, n int) { add(event{kind, int64(n), []byte(lane)}) })
	errs = append(errs, s.Close())
	t.set(nil)
	if err := errors.Join(errs...); err != nil {
		return err
	}
	var out bytes.Buffer
	if err := errors.Join(gob.NewEncoder(&out).Encode(base), gob.NewEncoder(&out).Encode(events)); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "trace"), out.Bytes(), 0o600)
}

const sector = 512

// disk is what a disk has of a file: what was synced, and what may be there or not.
type disk struct {
	synced []byte
	loose  []event
}

func (d *disk) do(e event) {
	if e.Kind != 's' {
		d.loose = append(d.loose, e)
		return
	}
	d.synced = d.after(func(int) bool { return true })
	d.loose = nil
}

// after is the file if the sectors that keep says have come to the disk.
func (d *disk) after(keep func(int) bool) []byte {
	data := bytes.Clone(d.synced)
	i := 0
	for _, e := range d.loose {
		switch e.Kind {
		case 't':
			if i++; keep(i) {
				data = append(data, make([]byte, max(0, int(e.Off)-len(data)))...)[:e.Off]
			}
		case 'w':
			for from := 0; from < len(e.Data); {
				to := min(len(e.Data), from+sector-int(e.Off+int64(from))%sector)
				if i++; keep(i) {
					end := int(e.Off) + to
					data = append(data, make([]byte, max(0, end-len(data)))...)
					copy(data[int(e.Off)+from:], e.Data[from:to])
				}
				from = to
			}
		}
	}
	return data
}

// The power goes at any call, and of what was not synced any part has come to the disk, in
// sectors of 512 bytes. What was confirmed is there, nothing is damaged, and what was flushed
// does not come again.
func TestPowerCut(t *testing.T) {
	dir := fastTemp(t)
	child(t, "trace", dir)
	trace, err := os.ReadFile(filepath.Join(dir, "trace"))
	if err != nil {
		t.Fatal(err)
	}
	d := &disk{}
	var events []event
	in := bytes.NewReader(trace)
	if err := errors.Join(gob.NewDecoder(in).Decode(&d.synced), gob.NewDecoder(in).Decode(&events)); err != nil {
		t.Fatal(err)
	}
	confirmed, committed, flushed := map[string]int{}, map[string]int{}, map[string]int{}
	cuts, syncs := 0, 0
	at := filepath.Join(dir, "cut")
	rng := rand.New(rand.NewPCG(1, 2))
	every := stride(8)
	for k, e := range events {
		switch e.Kind {
		case 'p':
			confirmed[string(e.Data)] = int(e.Off)
		case 'c':
			committed[string(e.Data)] += int(e.Off)
		case 'f':
			flushed[string(e.Data)] = int(e.Off)
		case 's':
			syncs++
			d.do(e)
		default:
			d.do(e)
		}
		if k%every != 0 {
			continue
		}
		for _, chance := range []float64{0, 1, 0.5, 0.9, 0.1, 0.5, 0.98, 0.02} {
			data := d.after(func(int) bool { return rng.Float64() < chance })
			if err := errors.Join(os.MkdirAll(at, 0o700), os.WriteFile(filepath.Join(at, fileName), data, 0o600)); err != nil {
				t.Fatal(err)
			}
			s, rec, err := Open(Config{Dir: at}, text{})
			if err != nil || len(rec.Damaged) > 0 {
				t.Fatalf("cut at event %d, %v kept: %v, %v", k, chance, rec.Damaged, err)
			}
			for _, name := range []string{"a", "b"} {
				got, err := heldBy(s.Lane(name))
				if err == nil {
					err = inOrder(got, flushed[name], committed[name]+6, confirmed[name], 300)
				}
				if err != nil {
					t.Fatalf("cut at event %d, %v kept: lane %s: %v", k, chance, name, err)
				}
			}
			if err := errors.Join(s.Close(), os.RemoveAll(at)); err != nil {
				t.Fatal(err)
			}
			cuts++
		}
	}
	t.Logf("%d cuts over %d events, %d of them syncs", cuts, len(events), syncs)
	if cuts < 500/every || syncs < 20 {
		t.Error("too few to show anything")
	}
}
