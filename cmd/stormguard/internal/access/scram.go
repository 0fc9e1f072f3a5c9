// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package access

import (
	"crypto/hmac"
	"crypto/pbkdf2"
	"crypto/rand"
	"crypto/sha256"
	"crypto/sha512"
	"crypto/subtle"
	"encoding/base64"
	"errors"
	"fmt"
	"hash"
	"strconv"
	"strings"
)

// scram is the client's side of one conversation of SCRAM (RFC 5802). sarama has no
// SCRAM of its own. scram does not prepare names and passwords by SASLprep: Kafka's
// brokers do not, either.
type scram struct {
	mechanism Mechanism
	password  string
	nonce     string
	header    string // GS2: no channel binding
	first     string // the client's first message, without the header
	signature []byte // the signature that the broker must send
	step      int    // number of calls of Step
}

// Limits for the iterations of a password. The least is that of RFC 7677. The most is
// above all usual settings, and keeps a broker from wasting the client's CPU.
const (
	minIterations = 4096
	maxIterations = 10_000_000
)

func (s *scram) hash() hash.Hash {
	if s.mechanism == ScramSHA512 {
		return sha512.New()
	}
	return sha256.New()
}

// Begin starts a conversation. Its error is always nil.
func (s *scram) Begin(user, password, authzID string) error {
	if s.nonce == "" {
		s.nonce = rand.Text()
	}
	escape := strings.NewReplacer("=", "=3D", ",", "=2C").Replace
	s.header = "n,"
	if authzID != "" {
		s.header += "a=" + escape(authzID)
	}
	s.header += ","
	s.password = password
	s.first = "n=" + escape(user) + ",r=" + s.nonce
	return nil
}

// Step returns the answer to a message of the broker. The first call has no message.
func (s *scram) Step(challenge string) (string, error) {
	s.step++
	switch s.step {
	case 1:
		return s.header + s.first, nil
	case 2:
		return s.prove(challenge)
	case 3:
		return "", s.verify(challenge)
	}
	return "", errors.New("SCRAM: the broker goes on after the end")
}

// Done tells whether the broker has proved that it knows the password.
func (s *scram) Done() bool { return s.step == 3 }

// prove answers the broker's nonce, salt and iterations.
func (s *scram) prove(challenge string) (string, error) {
	nonce, saltText, count, err := fields(challenge)
	if err != nil {
		return "", err
	}
	if !strings.HasPrefix(nonce, s.nonce) || nonce == s.nonce {
		return "", errors.New("SCRAM: the broker's nonce does not go on from ours")
	}
	salt, err := base64.StdEncoding.DecodeString(saltText)
	if err != nil {
		return "", fmt.Errorf("SCRAM: the broker's salt: %w", err)
	}
	iterations, err := strconv.Atoi(count)
	if err != nil || iterations < minIterations || iterations > maxIterations {
		return "", fmt.Errorf("SCRAM: the broker asks for %q iterations: must be %d to %d", count, minIterations, maxIterations)
	}
	salted, err := pbkdf2.Key(s.hash, s.password, salt, iterations, s.hash().Size())
	if err != nil {
		return "", fmt.Errorf("SCRAM: %w", err)
	}
	last := "c=" + base64.StdEncoding.EncodeToString([]byte(s.header)) + ",r=" + nonce
	said := []byte(s.first + "," + challenge + "," + last)
	clientKey := s.mac(salted, []byte("Client Key"))
	stored := s.hash()
	stored.Write(clientKey)
	proof := s.mac(stored.Sum(nil), said)
	subtle.XORBytes(proof, proof, clientKey)
	s.signature = s.mac(s.mac(salted, []byte("Server Key")), said)
	return last + ",p=" + base64.StdEncoding.EncodeToString(proof), nil
}

// verify checks the broker's own proof.
func (s *scram) verify(final string) error {
	text, ok := strings.CutPrefix(final, "v=")
	if !ok {
		return fmt.Errorf("SCRAM: the broker refuses: %q", final)
	}
	text, _, _ = strings.Cut(text, ",")
	signature, err := base64.StdEncoding.DecodeString(text)
	if err != nil || !hmac.Equal(signature, s.signature) {
		return errors.New("SCRAM: the broker does not know the password: it may be another one")
	}
	return nil
}

func (s *scram) mac(key, text []byte) []byte {
	m := hmac.New(s.hash, key)
	m.Write(text)
	return m.Sum(nil)
}

// fields splits the broker's first message: r=,s=,i= in this order.
func fields(challenge string) (nonce, salt, count string, err error) {
	parts := strings.SplitN(challenge, ",", 4)
	if len(parts) < 3 {
		return "", "", "", errors.New("SCRAM: the broker's first message has no nonce, salt and iterations")
	}
	for i, to := range []*string{&nonce, &salt, &count} {
		name := []string{"r=", "s=", "i="}[i]
		value, ok := strings.CutPrefix(parts[i], name)
		if !ok {
			return "", "", "", fmt.Errorf("SCRAM: the broker's first message has no %s where it must be", name)
		}
		*to = value
	}
	return nonce, salt, count, nil
}
