// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"bytes"
	"encoding/hex"
	"errors"
	"testing"
)

func testKey(b byte) []byte { return bytes.Repeat([]byte{b}, KeySize) }

// The vectors of c2sp.org/XAES-256-GCM.
func TestDeriveIsXAES(t *testing.T) {
	for _, v := range []struct {
		key        byte
		aad, ctext string
	}{
		{1, "", "ce546ef63c9cc60765923609b33a9a1974e96e52daf2fcf7075e2271"},
		{3, "c2sp.org/XAES-256-GCM", "986ec1832593df5443a179437fd083bf3fdb41abd740a21f71eb769d"},
	} {
		aead := newKey(testKey(v.key)).derive([saltSize]byte([]byte("ABCDEFGHIJKL")))
		got := aead.Seal(nil, []byte("MNOPQRSTUVWX"), []byte("XAES-256-GCM"), []byte(v.aad))
		if hex.EncodeToString(got) != v.ctext {
			t.Errorf("key %d: %x", v.key, got)
		}
	}
}

func mustRing(t testing.TB, keys ...[]byte) *Keyring {
	t.Helper()
	r, err := NewKeyring(keys...)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestSealRotation(t *testing.T) {
	a, b := mustRing(t, testKey(1)), mustRing(t, testKey(1))
	from, to := newSealer(a, 8), newSealer(b, 8)
	opens := func(want bool, step string) {
		t.Helper()
		for range 2 {
			packet, err := to.open(nil, from.seal(nil, []byte("hello")))
			if want != (err == nil && string(packet) == "hello") {
				t.Errorf("%s: %q, %v", step, packet, err)
			}
			if err != nil && !errors.Is(err, errSeal) {
				t.Errorf("%s: %v", step, err)
			}
		}
	}
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	opens(true, "one key")
	check(a.Add(testKey(2)))
	opens(true, "added")
	check(a.Use(testKey(2)))
	opens(false, "used where the other does not have it")
	check(b.Add(testKey(2)))
	opens(true, "used")
	check(b.Use(testKey(2)))
	check(b.Remove(testKey(1)))
	opens(true, "old one removed")
	late, lateRing := newSealer(a, 8), mustRing(t, testKey(2), testKey(3))
	reader := newSealer(lateRing, 8)
	packet := late.seal(nil, []byte("hello"))
	if _, err := reader.open(nil, packet); err != nil {
		t.Error(err)
	}
	check(lateRing.Use(testKey(3)))
	check(lateRing.Remove(testKey(2)))
	if _, err := reader.open(nil, packet); err == nil {
		t.Error("a removed key opens what it has opened before")
	}
	check(a.Use(testKey(1)))
	opens(false, "sealed with what was removed, though it had been derived before")
	if err := b.Remove(testKey(2)); !errors.Is(err, ErrConfig) {
		t.Errorf("the primary was removed: %v", err)
	}
	if err := b.Use(testKey(9)); !errors.Is(err, ErrConfig) {
		t.Errorf("an unknown key is used: %v", err)
	}
	check(b.Remove(testKey(9)))
	if a.Fingerprints()[0] == a.Fingerprints()[1] || a.Fingerprints()[1] != b.Fingerprints()[0] {
		t.Errorf("fingerprints %v, %v", a.Fingerprints(), b.Fingerprints())
	}
}

func TestKeyringValidates(t *testing.T) {
	for _, keys := range [][][]byte{nil, {nil}, {make([]byte, 16)}, {testKey(1), testKey(2)[:31]}} {
		if _, err := NewKeyring(keys...); !errors.Is(err, ErrConfig) {
			t.Errorf("%d keys: %v", len(keys), err)
		}
	}
	r := mustRing(t, testKey(0))
	for i := range MaxKeys - 1 {
		if err := r.Add(testKey(byte(i + 1))); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.Add(testKey(99)); !errors.Is(err, ErrConfig) {
		t.Errorf("one too many: %v", err)
	}
	if err := r.Add(testKey(0)); err != nil {
		t.Errorf("one that is there: %v", err)
	}
}

func TestSealRefusesEveryFlippedBit(t *testing.T) {
	s := newSealer(mustRing(t, testKey(1)), 8)
	packet := s.seal(nil, []byte("sixteen bytes at"))
	if _, err := s.open(nil, bytes.Clone(packet)); err != nil {
		t.Fatal(err)
	}
	for i := range len(packet) * 8 {
		bad := bytes.Clone(packet)
		bad[i/8] ^= 1 << (i % 8)
		if _, err := s.open(nil, bad); err == nil {
			t.Fatalf("bit %d does not matter", i)
		}
	}
	for n := range packet {
		if _, err := s.open(nil, bytes.Clone(packet[:n])); err == nil {
			t.Fatalf("%d bytes are enough", n)
		}
	}
}

func TestNoncesDiffer(t *testing.T) {
	s := newSealer(mustRing(t, testKey(1)), 8)
	other := newSealer(s.ring, 8)
	seen := map[string]bool{}
	for range 1000 {
		for _, x := range []*sealer{s, other} {
			nonce := string(x.seal(nil, nil)[1 : 1+saltSize+seqSize])
			if seen[nonce] {
				t.Fatalf("%x twice", nonce)
			}
			seen[nonce] = true
		}
	}
}

func TestSealAllocatesNothing(t *testing.T) {
	s := newSealer(mustRing(t, testKey(1)), 8)
	packet, b, plain := make([]byte, 1000), make([]byte, 0, 2000), make([]byte, 0, 2000)
	b = s.seal(b[:0], packet)
	if _, err := s.open(plain, b); err != nil {
		t.Fatal(err)
	}
	if n := testing.AllocsPerRun(1000, func() {
		b = s.seal(b[:0], packet)
		if _, err := s.open(plain, b); err != nil {
			t.Error(err)
		}
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestSealerForgetsIncarnations(t *testing.T) {
	s := newSealer(mustRing(t, testKey(1)), 4)
	for range 100 {
		if _, err := s.open(nil, newSealer(s.ring, 1).seal(nil, []byte{1})); err != nil {
			t.Fatal(err)
		}
	}
	if len(s.opens) > 4 {
		t.Errorf("%d incarnations are kept", len(s.opens))
	}
}
